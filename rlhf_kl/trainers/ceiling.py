"""An update of the policy that would carry its KL over the ceiling is shortened at once.

A beta in the reward acts over several updates; this acts inside the one that goes too far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.types import RolloutBatch

LINE_SEARCH_STEPS = 6
DESCENT_STEPS = 8
DESCENT_SHRINK = 0.5


@dataclass(frozen=True)
class CeilingResult:
    """What the ceiling did to an update; KL in nats of the target's unit, at the rollout's states."""

    factor: float  # share of the update that was kept; 1 = whole
    kl_before: float
    kl_after: float  # NaN where nothing needed it
    kl_uncut: float  # after the update as it came
    descended: bool = False  # the KL itself had to be stepped down


class KLForecast:
    """How much higher the next rollout's KL reads than the KL at this rollout's states.

    The new policy visits states of its own, where it lies further from the reference. The ratio of the two
    readings is averaged over the updates so far.
    """

    def __init__(self, rate: float = 0.2) -> None:
        self.rate, self.ratio = rate, 1.0
        self.predicted: float | None = None

    def observe(self, measured: float) -> None:
        """The KL of a new rollout, of which `predicted` was the reading at the old states."""
        if self.predicted is not None and self.predicted > 1e-4 and measured > 0:
            ratio = min(2.0, max(0.5, measured / self.predicted))
            self.ratio += self.rate * (ratio - self.ratio)

    def state_dict(self) -> dict[str, float | None]:
        """Everything that the next forecast depends on."""
        return {"ratio": self.ratio, "predicted": self.predicted}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Take over a saved state."""
        self.ratio = float(state["ratio"] or 1.0)
        self.predicted = state["predicted"]


class Ceiling:
    """Holds the KL of the next rollout below a limit, by shortening the update that would cross it."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        kl_now: Callable[[RolloutBatch], float],
        descend: Callable[[RolloutBatch], None],
        *,
        limit: float | None,
        measures: bool,
    ) -> None:
        """`kl_now` measures the policy as it is at a rollout's states; `descend` takes a step down its KL there.

        `limit` in nats of the target's unit, None = no update is shortened; then the KL after an update is measured
        where `measures`.
        """
        self.parameters, self.kl_now, self.descend = list(parameters), kl_now, descend
        self.limit, self.measures = limit, measures
        self.forecast = KLForecast()

    def snapshot(self) -> list[Tensor]:
        """The parameters before an update, where it may be shortened."""
        return [p.detach().clone() for p in self.parameters] if self.limit is not None else []

    def hold(self, rollout: RolloutBatch, before: list[Tensor], kl_before: float) -> CeilingResult:
        """After an update that began at `before`, with `kl_before` measured by the rollout."""
        self.forecast.observe(kl_before)
        if self.limit is None:
            kl = self.kl_now(rollout) if self.measures else math.nan
            return CeilingResult(1.0, kl_before, kl, kl)
        result = shorten_update(
            self.parameters,
            before,
            lambda: self.kl_now(rollout),
            kl_before,
            self.limit / self.forecast.ratio,
            lambda: self.descend(rollout),
        )
        self.forecast.predicted = result.kl_after
        return result

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return self.forecast.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.forecast.load_state_dict(state)


def shorten_update(
    parameters: list[nn.Parameter],
    before: list[Tensor],
    kl_at: Callable[[], float],
    kl_start: float,
    ceiling: float,
    descend: Callable[[], None],
) -> CeilingResult:
    """Keep as much of the update `before` -> `parameters` as the ceiling allows; always ends.

    `kl_at()` measures the KL (nats, the ceiling's unit) of the parameters as they are; `kl_start` is that of
    `before`. From below the ceiling: bisection along the update's own direction for the longest part that
    stays below (the line search of TRPO, Schulman et al. 2015, appendix C). From above it: the update is
    kept where it lowers the KL; otherwise it is undone and `descend()` (one gradient step on the KL itself)
    is taken instead, shortened until it lowers the KL. A KL that is not finite counts as one above the ceiling.
    """
    after = [p.detach().clone() for p in parameters]
    kl_uncut = kl_at()
    if kl_uncut <= ceiling or kl_uncut < kl_start:
        return CeilingResult(1.0, kl_start, kl_uncut, kl_uncut)

    def place(start: list[Tensor], end: list[Tensor], factor: float) -> None:
        with torch.no_grad():
            for p, a, b in zip(parameters, start, end, strict=True):
                p.copy_(torch.lerp(a, b, factor))

    if kl_start <= ceiling:
        low, high, kept = 0.0, 1.0, kl_start
        for _ in range(LINE_SEARCH_STEPS):
            middle = (low + high) / 2
            place(before, after, middle)
            kl = kl_at()
            if kl <= ceiling:
                low, kept = middle, kl
                if kl > 0.97 * ceiling:
                    break
            else:
                high = middle
        place(before, after, low)
        return CeilingResult(low, kl_start, kept, kl_uncut)

    place(before, after, 0.0)
    descend()
    stepped = [p.detach().clone() for p in parameters]
    factor, kl = 1.0, kl_at()
    for _ in range(DESCENT_STEPS):
        if kl < kl_start:
            return CeilingResult(0.0, kl_start, kl, kl_uncut, descended=True)
        factor *= DESCENT_SHRINK
        place(before, stepped, factor)
        kl = kl_at()
    place(before, after, 0.0)
    return CeilingResult(0.0, kl_start, kl_start, kl_uncut)
