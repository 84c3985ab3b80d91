"""The default: learn during the run which beta holds the target, and how fast the KL gets there."""

from __future__ import annotations

import math
from typing import ClassVar

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive

PRIOR_SPREAD = (0.05, 2.0)  # of pace, and of the log of the beta that holds the target
DRIFT = (0.005, 0.25)  # how far each may wander per update
NOISE = 0.035  # of one move of sqrt(KL/target): the batch's and the policy's own
FASTEST_FALL = -0.25  # whitened advantages bound the pace back as well
PACES = (0.05, 0.5)
MOST_LEARNT = (-1.0, 1.5)  # of log beta from one update
HEARD_AT_ALL = 0.25  # an update cut to less than this says little of its own length
LESSON = 0.3  # added to log b for an update that the ceiling undid altogether


class AdaptiveKL(KLController):
    """Model-based control of x = sqrt(KL/target), the policy's distance from the reference.

    PPO with whitened advantages moves at a pace `a` that the balance of score and penalty decides:

        x_{k+1} - x_k = a (1 - x_k (beta'_k / b)^p),    beta'_k = sqrt(beta_k beta_{k-1})

    (half of a change is felt one update later: the optimizer's momentum and the values still know the old beta)
    so x settles at (b / beta)^p; b is the beta that holds the target. The Gaussian law has p = 1, scores
    that saturate come to about a half (measured on `builtin:reviews`). The controller fits a and log b
    by an extended Kalman filter (Jazwinski 1970, ch. 8) as the run goes, predicts the x that beta_k has
    already decided, and solves for the beta that then takes x a share `approach` of the way to 1. Changes
    of log beta per update lie within [-down, up].

    What follows from that: no integral, so nothing to wind up; no cold start to hold through, since a KL on
    its way up is predicted and not taken for an error; a starting beta that is wrong by a factor of ten is
    found out from the first moves. The first update starts at the reference, where a KL has no gradient:
    nothing is learnt from it. An update that the ceiling cut to a fraction
    counts as what it would have been, and every cut says that b was taken for too small.
    """

    state_names: ClassVar[tuple[str, ...] | None] = (
        "coef",
        "kept",
        "pace",
        "log_holding",
        "spread",
        "last",
        "log_before",
        "seen",
    )

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        approach: float = 0.22,
        pace: float = 0.15,
        power: float = 0.45,
        down: float = 1.2,
        up: float = 1.8,
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
    ) -> None:
        """`pace` is the prior of a, `power` is p; the fit begins with the starting beta as its b."""
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.approach = require_fraction("approach", require_positive("approach", approach))
        self.power = require_positive("power", power)
        self.down, self.up = require_positive("down", down), require_positive("up", up)
        self.pace = clip(require_positive("pace", pace), *PACES)
        self.log_holding = self.log_before = math.log(self.coef)
        self.spread = [[PRIOR_SPREAD[0] ** 2, 0.0], [0.0, PRIOR_SPREAD[1] ** 2]]
        self.kept = 1.0  # of the update that beta_k is making now
        self.last: dict[str, float] | None = None  # x, felt log beta and kept of the previous update
        self.seen = 0

    def observe_backtrack(self, factor: float) -> None:
        self.kept = factor

    def update(self, kl: float, episodes: int) -> None:
        del episodes
        x, log_coef = math.sqrt(max(kl, 0.0) / self.target), math.log(self.coef)
        felt = (log_coef + self.log_before) / 2.0
        kept, self.kept = self.kept, 1.0
        self.seen += 1
        if self.last is not None and self.seen > 2 and self.last["kept"] > HEARD_AT_ALL:
            self._learn(x - self.last["x"], **self.last)
        self.log_holding += LESSON * (1.0 - kept)
        self.last, self.log_before = {"x": x, "felt": felt, "kept": kept}, log_coef
        if self.seen == 1:
            return  # the KL of the reference to itself says nothing
        after = max(0.05, x + kept * self._move_of(x, felt))
        push = clip(1.0 - self.approach * (1.0 - after) / self.pace, 0.05, 20.0)
        wanted = self.log_holding + math.log(push / max(after, 0.2)) / self.power
        self._move(clip(wanted - log_coef, -self.down, self.up))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        del episodes
        return self.down, self.up

    def _pull(self, x: float, felt: float) -> float:
        """The penalty's share of the balance: 1 holds x where it is."""
        return x * math.exp(clip(self.power * (felt - self.log_holding), -20.0, 3.0))

    def _move_of(self, x: float, felt: float) -> float:
        return max(FASTEST_FALL, self.pace * (1.0 - self._pull(x, felt)))

    def _learn(self, move: float, x: float, felt: float, kept: float) -> None:
        """One step of the filter, from a whole or partly kept `move` that began at `x`."""
        expected, pull = self._move_of(x, felt), self._pull(x, felt)
        seen = [0.0 if expected == FASTEST_FALL else 1.0 - pull, self.pace * pull * self.power]
        for i in (0, 1):
            self.spread[i][i] += DRIFT[i] ** 2
        cross = [sum(s * h for s, h in zip(row, seen, strict=True)) for row in self.spread]
        share = [c / (sum(h * c for h, c in zip(seen, cross, strict=True)) + (NOISE / kept) ** 2) for c in cross]
        surprise = clip(move / kept - expected, -1.0, 1.0)
        self.pace = clip(self.pace + share[0] * surprise, *PACES)
        self.log_holding += clip(share[1] * surprise, *MOST_LEARNT)
        self.spread = [[self.spread[i][j] - share[i] * cross[j] for j in (0, 1)] for i in (0, 1)]
