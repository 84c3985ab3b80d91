"""The belt proper: an update of the policy that would carry its KL over the ceiling is shortened at once.

A beta in the reward acts over several updates; this acts inside the one that goes too far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LINE_SEARCH_STEPS = 6
DESCENT_STEPS = 8
DESCENT_SHRINK = 0.5


@dataclass(frozen=True)
class Cut:
    """What the guard did to an update."""

    factor: float  # share of the update that was kept; 1 = whole
    kl_before: float  # nats in the target's unit, on the rollout's states
    kl_after: float  # the same after the guard
    kl_whole: float  # the same after the update as it came, before the guard
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
            seen = min(2.0, max(0.5, measured / self.predicted))
            self.ratio += self.rate * (seen - self.ratio)

    def state_dict(self) -> dict[str, float | None]:
        """Everything that the next forecast depends on."""
        return {"ratio": self.ratio, "predicted": self.predicted}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Take over a saved state."""
        self.ratio = float(state["ratio"] or 1.0)
        self.predicted = state["predicted"]


def shorten_update(
    parameters: list[nn.Parameter],
    before: list[Tensor],
    kl_at: Callable[[], float],
    kl_start: float,
    ceiling: float,
    descend: Callable[[], None],
) -> Cut:
    """Keep as much of the update `before` -> `parameters` as the ceiling allows; always ends.

    `kl_at()` measures the KL (nats, the ceiling's unit) of the parameters as they are; `kl_start` is that of
    `before`. From below the ceiling: bisection along the update's own direction for the longest part that
    stays below (the line search of TRPO, Schulman et al. 2015, appendix C). From above it: the update is
    kept where it lowers the KL; otherwise it is undone and `descend()` (one gradient step on the KL itself)
    is taken instead, shortened until it lowers the KL.
    """
    after = [p.detach().clone() for p in parameters]
    kl_full = kl_at()
    if kl_full <= ceiling or kl_full < kl_start:
        return Cut(1.0, kl_start, kl_full, kl_full)

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
        return Cut(low, kl_start, kept, kl_full)

    place(before, after, 0.0)
    descend()
    stepped = [p.detach().clone() for p in parameters]
    factor, kl = 1.0, kl_at()
    for _ in range(DESCENT_STEPS):
        if kl < kl_start:
            return Cut(0.0, kl_start, kl, kl_full, descended=True)
        factor *= DESCENT_SHRINK
        place(before, stepped, factor)
        kl = kl_at()
    place(before, after, 0.0)
    return Cut(0.0, kl_start, kl_start, kl_full)
