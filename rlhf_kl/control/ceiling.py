"""Shortens an update of the policy that would raise its KL above the ceiling.

A beta in the reward acts over several updates; the ceiling acts inside the one that goes too far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlhf_kl.control.base import SURE
from rlhf_kl.control.way import Line, Way
from rlhf_kl.ops.masked import Mean

# Of the search: measured on adapters and on policies that blew up. Of the forecast: fitted to recorded runs.
MOST_TRIES = 8  # of a search: powers of the share from 0.7 to 3.6 took 2 to 5, a KL with a cliff up to 8
LEAST_STEP = 0.1  # of the share in one try: to go back up enlarges the rounding of the weights by as much
TOLERANCE = 0.03  # of a KL: a search aims so far below the limit, and ends so near to where it aims
FORGETTING = 0.9  # weight of past updates in the forecast, per update: about the last ten count
PRIOR_CHANGE = 0.15  # of the target: the prior of the forecast weighs as much as one change of the KL of this size


@dataclass(frozen=True)
class CeilingResult:
    """Effect of the ceiling on an update; KL in nats of the target's unit, at the rollout's states."""

    factor: float = 1.0  # share that was kept of the update, or of the way from the reference; 1 = whole
    kl_before: float = math.nan
    kl_after: float = math.nan  # NaN if not measured
    kl_uncut: float = math.nan  # after the whole update
    scale: float = 1.0  # of the way from the reference, after all of that


ReadKL = Callable[[bool], Mean]  # the current policy's KL at the states of the rollout: of all, or (False) by some


class KLForecast:
    """Forecast of the next rollout's KL, from the KL at the states of this one.

    A policy that moved away visits other states, where it lies further from its reference than at the old ones: its
    KL changes `gain` times as much as it does there. A policy that learns a small batch by heart moves less at new
    prompts: its gain is below 1. It is fitted to the updates so far by least squares, each weighted by FORGETTING
    less than the next; a policy that did not move keeps its KL.
    """

    def __init__(self, target: float) -> None:
        self.prior = (PRIOR_CHANGE * target) ** 2
        self.product = self.square = 0.0  # of changes: expected times measured, expected squared
        self.made: tuple[float, float] | None = None  # the KL that the last rollout measured, and after its update

    @property
    def gain(self) -> float:
        return max(0.0, (self.prior + self.product) / (self.prior + self.square))

    def __call__(self, before: float, after: float) -> float:
        """The KL of the next rollout, if this one measured `before` and its states have `after` now."""
        return before + (self.gain if after > before else min(1.0, self.gain)) * (after - before)  # no false relief

    def observe(self, measured: float) -> None:
        """The KL of a new rollout."""
        if self.made is not None:
            before, after = self.made
            self.product = FORGETTING * self.product + (after - before) * (measured - before)
            self.square = FORGETTING * self.square + (after - before) ** 2

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next forecast depends on."""
        return {"product": self.product, "square": self.square, "made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.product, self.square = float(state["product"]), float(state["square"])
        self.made = None if state["made"] is None else (state["made"][0], state["made"][1])


class Ceiling:
    """Keeps the KL of the next rollout below a limit: shortens an update that would cross it."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        way: Way | None,
        *,
        target: float,
        limit: float | None,
        measures: bool,
    ) -> None:
        """`way`: from the reference; None = unknown, since the policy did not begin there.

        `target` and `limit` in nats of the target's unit. Without a limit no update is shortened, and the KL after it
        is measured where `measures`.
        """
        self.parameters = list(parameters)
        self.way = way
        self.limit, self.measures = limit, measures
        self.forecast = KLForecast(target)

    def snapshot(self) -> list[Tensor]:
        """The parameters before an update, if it may be shortened and only they tell in which direction."""
        needed = self.limit is not None and self.way is None
        return [p.detach().clone() for p in self.parameters] if needed else []

    def hold(self, read_kl: ReadKL, before: list[Tensor], measured: Mean) -> CeilingResult:
        """After an update that began at `before`; `measured` is the rollout's own KL.

        The limit holds for the forecast of the next rollout's KL, without its standard error: else one heavy row of a
        small batch would cut updates. A policy that would cross it is scaled towards its reference (see `scale`).
        Where the way from there is unknown the update itself is shortened (the line search of TRPO, Schulman et al.
        2015, appendix C); where the policy stood above the limit already, the update or its undoing is kept, whichever
        has the lower KL.
        """
        self.forecast.observe(measured.mean)
        if self.limit is None:
            kl = read_kl(False) if self.measures else Mean(math.nan, 0.0)
            result = CeilingResult(1.0, measured.mean, kl.mean, kl.mean)
        else:
            result = self._shorten(read_kl, before, measured, self.limit)
        self.forecast.made = (measured.mean, result.kl_after) if math.isfinite(result.kl_after) else None
        return result

    def scale(self, read_kl: ReadKL, move: CeilingResult, share: float) -> CeilingResult:
        """theta_ref + share (theta - theta_ref): near the reference the KL goes with the square of the share.

        A smaller share is corrected until the KL is the square of `share` times what it was, as measured: of an
        adapter, or far away, it falls with another power.
        """
        if self.way is None or share == 1.0:
            return move
        line, after = self.way.line(), move.kl_after * share**2
        if share >= 1.0 - TOLERANCE or share == 0.0:
            line.go(share)
        else:
            whole = read_kl(True).mean  # the KL after the update may be known by half of the prompts
            wanted = whole * share**2
            found = self._search(line, read_kl, share**-2, lambda kl: kl.mean / wanted if wanted else 1.0, aim=1.0)
            after = read_kl(True).mean if found is None else found
        if self.forecast.made is not None:
            self.forecast.made = (self.forecast.made[0], after)
        return replace(move, kl_after=after, scale=move.scale * line.share)

    def seen(self, move: CeilingResult) -> tuple[float, float, float]:
        """The KL before the update, and those expected of the next rollout: after it, and had it not been cut."""
        start, gain = move.kl_before, self.forecast.gain
        return start, start + gain * (move.kl_after - start), start + gain * (move.kl_uncut - start)

    def _shorten(self, read_kl: ReadKL, before: list[Tensor], measured: Mean, limit: float) -> CeilingResult:
        start = measured.mean

        def of_limit(kl: Mean) -> float:
            """The forecast over the limit; infinite for a KL that is not finite."""
            value = self.forecast(start, kl.mean) / limit
            return value if math.isfinite(value) else math.inf

        uncut = read_kl(False)
        if of_limit(uncut) > 1.0 - SURE * uncut.stderr / limit:
            uncut = read_kl(True)
        far = of_limit(uncut)
        if far <= 1.0:
            return CeilingResult(1.0, start, uncut.mean, uncut.mean)
        if self.way is not None:
            # The states of a scaled policy are nearer as well, so its forecast falls as its KL does.
            each = max(1.0 / limit, far / uncut.mean) if math.isfinite(far) else math.nan
            share, after = self._below(self.way.line(), read_kl, far, lambda kl: kl.mean * each)
            return CeilingResult(share, start, 0.0 if after is None else after, uncut.mean, share)
        line = Line(self.parameters, before)
        if of_limit(measured) <= 1.0:
            share, after = self._below(line, read_kl, far, of_limit, origin=of_limit(measured))
            return CeilingResult(share, start, start if after is None else after, uncut.mean)
        if uncut.mean < start:
            return CeilingResult(1.0, start, uncut.mean, uncut.mean)
        line.go(0.0)
        return CeilingResult(0.0, start, start, uncut.mean)

    def _below(
        self, line: Line, read_kl: ReadKL, over: float, of_limit: Callable[[Mean], float], origin: float = 0.0
    ) -> tuple[float, float | None]:
        """Go to where `of_limit(KL)` is just below 1, from a point where it is `over`.

        Returns the share of the way that is left, and the KL there; None at the origin, where no other point is known.
        """
        kl = self._search(line, read_kl, over, of_limit, 1.0 - TOLERANCE, origin) if math.isfinite(over) else None
        if kl is None:
            line.go(0.0)
        return line.share, kl

    def _search(
        self,
        line: Line,
        read_kl: ReadKL,
        over: float,
        of_limit: Callable[[Mean], float],
        aim: float,
        origin: float = 0.0,
    ) -> float | None:
        """Go to where `of_limit(KL)` is near `aim`, between the line's origin and its end; never beyond it.

        `over` and `origin`: what it is at both. Of its square root, a straight line near the reference, the root is
        found by regula falsi, with the Illinois rule against ends that stay (Dowell and Jarratt 1971). Returns the
        KL there; where no try was near, that of the best one below. None if none was, at the last try.
        """

        def height(value: float) -> float:
            return math.sqrt(max(0.0, value) / aim) - 1.0

        low, high = (0.0, height(origin)), (line.share, height(over))
        found: tuple[float, float] | None = None  # the best share below, and its KL
        side = 0
        for _ in range(MOST_TRIES):
            share = (low[0] * high[1] - high[0] * low[1]) / (high[1] - low[1])
            if not math.isfinite(share):
                share = (low[0] + high[0]) / 2.0
            line.go(max(share, low[0], LEAST_STEP * high[0]))
            kl = read_kl(True)
            value = of_limit(kl) if math.isfinite(kl.mean) else math.inf
            if abs(value - aim) <= TOLERANCE:
                return kl.mean
            here = line.share, height(value)
            if value < aim:
                low, high, found = here, (high[0], high[1] / 2.0 if side < 0 else high[1]), (line.share, kl.mean)
                side = -1
            else:
                low, high = (low[0], low[1] / 2.0 if side > 0 else low[1]), here
                side = 1
        if found is None:
            return None
        line.go(found[0])
        return found[1]
