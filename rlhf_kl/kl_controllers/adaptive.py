"""The default: learn during the run how its KL depends on beta, and choose beta accordingly."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive
from rlhf_kl.kl_controllers.step_model import Situation, StepModel

if TYPE_CHECKING:
    from rlhf_kl.kl_controllers.belief import Belief

USUAL_PACE = 0.2  # of x per update, before a step was observed
FIRST_STEP = 1.65  # paces: Adam's first steps have no momentum to build up
PACE_BOUNDS = (1e-3, 0.5)
NOISE = 0.15  # of a step measured at the rollout's own states, in paces
SAMPLING_NOISE = 0.04  # added to it where a step is the difference of two rollouts' distances
MEASURED_WEIGHT = 0.5  # of a measured distance beside the predicted one
JUMP = 0.3  # no noise is this large: a rollback, or a batch of other prompts
FARTHEST = 100.0  # beyond it a KL is far too high, by how much makes no difference
OFFSET_RATE = 0.05  # of learning the mean error of predicted steps, which is not 0 while b rises
FASTEST = 0.9  # paces: the longest step that is planned on the way to the target
CANDIDATES = 61  # changes of log beta that are compared


class AdaptiveKL(KLController):
    """Predictive control of x = sqrt(KL/target), the policy's distance from its reference.

    A step of x carries momentum (Adam's, and that of values which were fitted to the old beta) and is driven by the
    balance of penalty and score. Whitened advantages and Adam bound the drive on both sides:

        step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + r log(beta_k / b))

    b is the beta that holds the target and a the pace. Both differ from run to run and b wanders, so the
    controller keeps a belief about the pair (`Belief`) and learns from every step it observes. m, s and r were fitted
    to PPO runs. The next beta is the one whose expected squared distance to the x a share `approach` nearer
    to 1 is least: an uncertain belief makes it careful by itself. log beta changes by -down to up per update.

    `observe_update` gets the KL before and after the update at the same states: the step without the noise of
    sampling. Where it is not called, steps are differences of successive measurements.

    It follows that a cold start needs no holding, since a KL on its way up is predicted and not taken for an error;
    that the first steps correct a starting beta which is wrong by a factor of ten; that an update which a ceiling
    cut still counts with its full length; and that the one integral, of the errors of predictions, forgets. The
    first update starts where a KL has no gradient, so it shows the pace and nothing of b.
    """

    state_names = ("coef", "distance", "step", "offset", "observed", "unobserved", "updates")

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
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        """`momentum`, `distance_power` and `coef_power` are m, s and r."""
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.approach = require_fraction("approach", require_positive("approach", approach))
        self.down, self.up = require_positive("down", down), require_positive("up", up)
        self.start_coef = self.coef
        self.model = StepModel(
            momentum=require_fraction("momentum", momentum),
            distance_power=require_positive("distance_power", distance_power),
            coef_power=require_positive("coef_power", coef_power),
        )
        self.distance: float | None = None  # x of the policy that samples next, as predicted
        self.step = 0.0  # the last change of x, before any cut
        self.offset = 0.0  # mean error of predicted steps
        self.observed: tuple[float, float] | None = None  # this update's step: without any cut, and with it
        self.unobserved: Situation | None = None  # of a step that only the next measurement will show
        self.updates = 0

    @cached_property
    def _belief(self) -> Belief:
        """Made at its first use: it needs numpy, which checking a config does not."""
        from rlhf_kl.kl_controllers.belief import Belief

        return Belief(self.model, self.start_coef, self.min_coef, self.max_coef, USUAL_PACE)

    @property
    def holding_coef(self) -> float:
        """The estimate of b, the beta that holds the target."""
        return self._belief.holding_coef

    def observe_update(self, kl_before: float, kl_after: float, kl_uncut: float) -> None:
        before = self._distance_of(kl_before)
        self.observed = (self._distance_of(kl_uncut) - before, self._distance_of(kl_after) - before)

    def update(self, kl: float, episodes: int) -> None:
        measured = self._distance_of(kl)
        if self.unobserved is not None:
            past = Situation(*self.unobserved)  # a restored state holds a list
            self.step = measured - past.distance
            self._learn(self.step, past, SAMPLING_NOISE)
        here = Situation(self._fused(measured), self.step, math.log(self.coef))
        self.updates += 1
        if self.observed is not None:
            (uncut, kept), self.unobserved = self.observed, None
            self._learn(uncut, here)
        else:
            uncut = kept = self._belief.mean_step(here)
            self.unobserved = here
        self.observed = None
        self.distance, self.step = max(0.0, here.distance + kept), uncut
        if self.updates > 1:
            self._move(self._best_move(Situation(self.distance, self.step, math.log(self.coef))))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.down, self.up

    def state_dict(self) -> dict[str, Any]:
        belief = {"pace": self._belief.pace, "probabilities": self._belief.probabilities.tolist()}
        return super().state_dict() | {"belief": belief}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy as np

        super().load_state_dict({name: value for name, value in state.items() if name != "belief"})
        self._belief.pace = float(state["belief"]["pace"])
        self._belief.probabilities = np.array(state["belief"]["probabilities"])

    def _distance_of(self, kl: float) -> float:
        return min(math.sqrt(max(kl, 0.0) / self.target), FARTHEST)

    def _fused(self, measured: float) -> float:
        """The mean of the measured distance and the predicted one, by their weights."""
        if self.distance is None or abs(measured - self.distance) > JUMP:
            return measured
        return self.distance + MEASURED_WEIGHT * (measured - self.distance)

    def _learn(self, step: float, at: Situation, added_noise: float = 0.0) -> None:
        belief = self._belief
        first = self.updates <= 1  # of an unobserved one too: the next update learns it before it counts itself
        guess = clip(abs(step) / FIRST_STEP, *PACE_BOUNDS)
        if guess > belief.pace or (first and at.distance < JUMP):
            belief.pace = guess
        if first:
            return
        noise = NOISE * belief.pace + added_noise
        error = clip(step - belief.mean_step(at), -2.0 * noise, 2.0 * noise)  # an odd update is no trend
        self.offset += OFFSET_RATE * (error - self.offset)
        belief.update(step, at, noise)

    def _best_move(self, at: Situation) -> float:
        """The change of log beta whose next step is expected to be nearest to the wanted one."""
        longest = FASTEST * self._belief.mean_pace
        wanted = clip(self.approach * (1.0 - at.distance), -longest, longest) - self.offset
        width = (self.down + self.up) / (CANDIDATES - 1)
        moves = sorted([0.0, *(i * width - self.down for i in range(CANDIDATES))], key=abs)  # of equals the least
        return min(moves, key=lambda move: self._belief.expected_miss(wanted, at._replace(log_coef=at.log_coef + move)))
