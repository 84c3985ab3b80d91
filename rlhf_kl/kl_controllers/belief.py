"""A belief about the run: probabilities on a grid, updated with every observed step of the policy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rlhf_kl.kl_controllers.step_model import Situation, StepModel

Floats = npt.NDArray[np.float64]

GRID_STEP, GRID_POINTS = 0.1, 400  # of log b; if the bounds are wider than the points cover, the steps are longer
PRIOR_SPREAD = 2.0  # of log b around the log of the starting beta
PACES = np.array([0.25, 0.5, 1.0, 2.0, 4.0])  # multiples of the guess
NEAREST = 0.05  # at distance 0 a KL has no gradient, and no logarithm


class Belief:
    """Probabilities of the pair (log b, a): the log of the beta that holds the target, and the pace.

    A histogram filter: Bayes' rule on a grid, without linearising (Thrun, Burgard & Fox 2005, Probabilistic
    Robotics, section 4.1). `pace` is a guess of a, which PACES multiplies.
    """

    def __init__(self, model: StepModel, coef: float, min_coef: float, max_coef: float, pace: float) -> None:
        self.model, self.pace = model, pace
        low, high = math.log(min_coef) - 1.0, math.log(max_coef) + 1.0
        points = math.ceil((high - low) / max(GRID_STEP, (high - low) / GRID_POINTS)) + 1
        self.log_holding: Floats = np.linspace(low, high, points)
        paces = _normalised(np.exp(-0.5 * (np.log(PACES) / model.pace_spread) ** 2))
        distance = (self.log_holding - math.log(coef)) / PRIOR_SPREAD
        self.probabilities: Floats = np.outer(_normalised(np.exp(-0.5 * distance**2)), paces)

    @property
    def holding_coef(self) -> float:
        """exp of the mean of log b."""
        return math.exp(float(self.probabilities.sum(1) @ self.log_holding))

    @property
    def mean_pace(self) -> float:
        """The mean of a."""
        return self.pace * float(self.probabilities.sum(0) @ PACES)

    def mean_step(self, at: Situation) -> float:
        """The expected step."""
        return float((self.probabilities * self._steps(at)).sum())

    def drive_share(self, at: Situation) -> float:
        """The expected drive over the pace, in [-1, 1]."""
        return float(self.probabilities.sum(1) @ self._drive(at))

    def expected_miss(self, wanted: float, at: Situation) -> float:
        """Expected squared difference between the step and the wanted one."""
        return float((self.probabilities * (self._steps(at) - wanted) ** 2).sum())

    def update(self, step: float, at: Situation, noise: float) -> None:
        """Learn from a step that was measured with this standard deviation."""
        error = (step - self._steps(at)) / noise
        tails, wander = self.model.tails, self.model.wander
        likely = self.probabilities * (1.0 + error**2 / tails) ** (-(tails + 1.0) / 2.0)
        padded = np.concatenate([likely[:1], likely, likely[-1:]])  # log b wanders to its neighbours
        self.probabilities = _normalised(wander * (padded[:-2] + padded[2:]) + (1.0 - 2.0 * wander) * likely)

    def _steps(self, at: Situation) -> Floats:
        """The next step under each log b (rows) and pace (columns)."""
        drive = self._drive(at)[:, None] * (self.pace * PACES)
        steps: Floats = self.model.momentum * at.step + (1.0 - self.model.momentum) * drive
        return steps

    def _drive(self, at: Situation) -> Floats:
        """The drive under each log b, in paces."""
        balance = self.model.distance_power * math.log(max(at.distance, NEAREST)) + at.log_coef - self.log_holding
        drive: Floats = -np.tanh(balance)
        return drive


def _normalised(weights: Floats) -> Floats:
    total: Floats = weights / weights.sum()
    return total
