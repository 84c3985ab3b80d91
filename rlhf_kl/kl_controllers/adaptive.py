"""The default: learn during the run how its KL answers to beta, and place beta accordingly."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive

Floats = npt.NDArray[np.float64]

PRIOR_SPREAD = 2.0  # of log b around the log of the starting beta
GRID_STEP, GRID_POINTS = 0.1, 400  # of log b; wider bounds than the points can cover make the steps longer
PACES = np.array([0.3, 0.6, 1.0, 1.7, 3.0, 6.0, 12.0])  # multiples of the guess
PACE_SPREAD = 0.5  # of the logarithm of the pace around that guess
PACE_RETURN = 0.02  # share of the belief about the pace that goes back to the guess, every update
USUAL_PACE = 0.2  # of x per update, where the first step tells nothing
FIRST_STEP = 1.65  # paces: Adam's first steps have no momentum to build up
DIFFUSION = 0.125  # share of the belief that moves to either neighbour: log b wanders by half a grid step
NOISE = 0.15  # of a step seen at the rollout's own states, in paces
BLIND_NOISE = 0.04  # added to it where a step is the difference of two measured distances
TAILS = 4.0  # degrees of freedom of Student's t: an odd update proves little
TRUST = 0.5  # in a measured distance against the predicted one
JUMP = 0.3  # no noise is this large: a rollback, or a batch of other prompts
NEAREST = 0.05  # at distance 0 a KL has no gradient, and no logarithm
FARTHEST = 100.0  # beyond it a KL says no more than that it is far too high
HARDEST = 0.9  # share of the pace that is asked for on the way to the target
PACE_BOUNDS = (1e-3, 0.5)
CANDIDATES = 61  # betas that are compared


class AdaptiveKL(KLController):
    """Predictive control of x = sqrt(KL/target), the policy's distance from its reference.

    A step of x carries momentum (Adam's, and that of values which still know the old beta) and is driven by the
    balance of penalty and score. Whitened advantages and Adam bound the drive on both sides:

        step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + r log(beta_k / b))

    b is the beta that holds the target and a the pace. Both differ from run to run and b wanders, so the
    controller keeps a belief about the pair on a grid and multiplies in the likelihood of every step it sees
    (Bayes' rule on a grid, without linearising: Thrun et al. 2005, Probabilistic Robotics, ch. 4). m, s and r
    were fitted to PPO runs. The next beta is the one whose expected squared distance to the x a share `approach`
    nearer to 1 is least: an uncertain belief makes it careful by itself. log beta changes by at most
    -down to up per update.

    `observe_update` brings the KL before and after the update at the same states, which shows the step without
    the noise of sampling; without it, steps are differences of successive measurements.

    What follows: no integral, so nothing to wind up; no cold start to hold through, since a KL on its way up
    is predicted and not taken for an error; a starting beta that is wrong by a factor of ten is found out from
    the first steps; an update that a ceiling cut still teaches its full length. The first update starts where a
    KL has no gradient, so it tells the pace and nothing of b.
    """

    state_names: ClassVar[tuple[str, ...] | None] = (
        "coef", "belief", "pace", "distance", "step", "seen", "unseen", "updates",
    )  # fmt: skip

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        approach: float = 0.3,
        momentum: float = 0.45,
        distance_power: float = 1.5,
        coef_power: float = 0.9,
        down: float = 1.2,
        up: float = 1.8,
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
    ) -> None:
        """`momentum`, `distance_power` and `coef_power` are m, s and r."""
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.approach = require_fraction("approach", require_positive("approach", approach))
        self.momentum = require_fraction("momentum", momentum)
        self.distance_power = require_positive("distance_power", distance_power)
        self.coef_power = require_positive("coef_power", coef_power)
        self.down, self.up = require_positive("down", down), require_positive("up", up)
        low, high = math.log(self.min_coef) - 1.0, math.log(self.max_coef) + 1.0
        points = math.ceil((high - low) / max(GRID_STEP, (high - low) / GRID_POINTS)) + 1
        self._log_holding: Floats = np.linspace(low, high, points)
        distance = (self._log_holding - math.log(self.coef)) / PRIOR_SPREAD
        self._pace_prior = _normalised(np.exp(-0.5 * (np.log(PACES) / PACE_SPREAD) ** 2))
        belief = np.outer(_normalised(np.exp(-0.5 * distance**2)), self._pace_prior)
        self.belief: list[list[float]] = belief.tolist()  # of each log b (rows) with each pace
        self.pace = USUAL_PACE  # what PACES multiplies
        self.distance: float | None = None  # x of the policy that samples next, as predicted
        self.step = 0.0  # the last change of x, before any cut
        self.seen: tuple[float, float] | None = None  # this update's change of x: before and after any cut
        self.unseen: tuple[float, float, float] | None = None  # x, step and log beta of a step not seen yet
        self.updates = 0

    @property
    def holding_coef(self) -> float:
        """The beta believed to hold the target: exp of the mean of log b."""
        return math.exp(float(np.array(self.belief).sum(1) @ self._log_holding))

    def observe_update(self, kl_before: float, kl_after: float, kl_whole: float) -> None:
        before = self._distance_of(kl_before)
        self.seen = (self._distance_of(kl_whole) - before, self._distance_of(kl_after) - before)

    def update(self, kl: float, episodes: int) -> None:
        del episodes
        measured, log_coef = self._distance_of(kl), math.log(self.coef)
        if self.unseen is not None:
            self.step = measured - self.unseen[0]
            self._hear(self.step, *self.unseen, blind=True)
            self.unseen = None
        here = self._fused(measured)
        self.updates += 1
        if self.seen is not None:
            whole, kept = self.seen
            self._hear(whole, here, self.step, log_coef, blind=False)
        else:
            self.unseen = (here, self.step, log_coef)
            whole = kept = float((np.array(self.belief) * self._steps(here, self.step, log_coef)).sum())
        self.seen = None
        self.distance, self.step = max(0.0, here + kept), whole
        if self.updates > 1:
            self._move(self._best_move(self.distance, self.step, log_coef))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        del episodes
        return self.down, self.up

    # ------------------------------------------------------------------ the model

    def _distance_of(self, kl: float) -> float:
        return min(math.sqrt(max(kl, 0.0) / self.target), FARTHEST)

    def _fused(self, measured: float) -> float:
        """The distance, from its prediction and its measurement."""
        if self.distance is None or abs(measured - self.distance) > JUMP:
            return measured
        return self.distance + TRUST * (measured - self.distance)

    def _steps(self, x: float, step: float, log_coef: float | Floats) -> Floats:
        """The step after `step`, made at distance x with this beta, for each log b (rows) and pace (columns)."""
        balance = self.distance_power * math.log(max(x, NEAREST)) + self.coef_power * (log_coef - self._log_holding)
        drive: Floats = -np.tanh(balance)[:, None] * (self.pace * PACES)
        return self.momentum * step + (1.0 - self.momentum) * drive

    # ------------------------------------------------------------------ learning

    def _hear(self, seen: float, x: float, step: float, log_coef: float, *, blind: bool) -> None:
        """Learn from a step `seen`, made at distance `x` after `step` with this beta."""
        first = self.updates <= 1 + blind
        guess = clip(abs(seen) / FIRST_STEP, *PACE_BOUNDS)
        if guess > self.pace or (first and x < JUMP):
            self.pace = guess
        if first:
            return
        error = (seen - self._steps(x, step, log_coef)) / (NOISE * self.pace + BLIND_NOISE * blind)
        likely = np.array(self.belief) * (1.0 + error**2 / TAILS) ** (-(TAILS + 1.0) / 2.0)
        # log b wanders to its neighbours, the pace back to the guess; nothing is ever ruled out for good.
        padded = np.concatenate([likely[:1], likely, likely[-1:]])
        likely = _normalised(DIFFUSION * (padded[:-2] + padded[2:]) + (1.0 - 2.0 * DIFFUSION) * likely)
        kept = (1.0 - PACE_RETURN) * likely + PACE_RETURN * np.outer(likely.sum(1), self._pace_prior)
        self.belief = kept.tolist()

    # ------------------------------------------------------------------ placing beta

    def _best_move(self, x: float, step: float, log_coef: float) -> float:
        """The change of log beta after which the next step is expected to end nearest to where it should."""
        belief = np.array(self.belief)
        pace = self.pace * float(belief.sum(0) @ PACES)
        wanted = clip(self.approach * (1.0 - x), -HARDEST * pace, HARDEST * pace)
        moves = np.linspace(-self.down, self.up, CANDIDATES)
        moves = np.sort(np.append(moves, 0.0))
        costs = [float((belief * (self._steps(x, step, log_coef + m) - wanted) ** 2).sum()) for m in moves]
        return float(moves[int(np.argmin(costs))])


def _normalised(weights: Floats) -> Floats:
    total: Floats = weights / weights.sum()
    return total
