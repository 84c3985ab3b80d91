"""The default: learn during the run how its KL answers to beta, and place beta accordingly."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive

if TYPE_CHECKING:
    from rlhf_kl.kl_controllers.belief import Belief, Situation

USUAL_PACE = 0.2  # of x per update, where the first step tells nothing
FIRST_STEP = 1.65  # paces: Adam's first steps have no momentum to build up
PACE_BOUNDS = (1e-3, 0.5)
NOISE = 0.15  # of a step seen at the rollout's own states, in paces
BLIND_NOISE = 0.04  # added to it where a step is the difference of two measured distances
TRUST = 0.5  # in a measured distance against the predicted one
JUMP = 0.3  # no noise is this large: a rollback, or a batch of other prompts
FARTHEST = 100.0  # beyond it a KL says no more than that it is far too high
OFFSET_RATE = 0.05  # of learning what predicted steps miss on average, as they do while b rises
HARDEST = 0.9  # share of the pace that is asked for on the way to the target
CANDIDATES = 61  # changes of log beta that are compared


class AdaptiveKL(KLController):
    """Predictive control of x = sqrt(KL/target), the policy's distance from its reference.

    A step of x carries momentum (Adam's, and that of values which still know the old beta) and is driven by the
    balance of penalty and score. Whitened advantages and Adam bound the drive on both sides:

        step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + r log(beta_k / b))

    b is the beta that holds the target and a the pace. Both differ from run to run and b wanders, so the
    controller keeps a belief about the pair (`Belief`) and learns from every step it sees. m, s and r were fitted
    to PPO runs. The next beta is the one whose expected squared distance to the x a share `approach` nearer
    to 1 is least: an uncertain belief makes it careful by itself. log beta changes by -down to up per update.

    `observe_update` brings the KL before and after the update at the same states, which shows the step without
    the noise of sampling; without it, steps are differences of successive measurements.

    What follows: no cold start to hold through, since a KL on its way up is predicted and not taken for an
    error; a starting beta that is wrong by a factor of ten is found out from the first steps; an update that a
    ceiling cut still teaches its full length; the one integral, of what predictions miss, forgets. The first
    update starts where a KL has no gradient, so it tells the pace and nothing of b.
    """

    state_names: ClassVar[tuple[str, ...] | None] = (
        "coef", "distance", "step", "offset", "seen", "unseen", "updates",
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
        self.down, self.up = require_positive("down", down), require_positive("up", up)
        self.start_coef = self.coef
        self.momentum = require_fraction("momentum", momentum)
        self.distance_power = require_positive("distance_power", distance_power)
        self.coef_power = require_positive("coef_power", coef_power)
        self.distance: float | None = None  # x of the policy that samples next, as predicted
        self.step = 0.0  # the last change of x, before any cut
        self.offset = 0.0  # what predicted steps miss on average
        self.seen: tuple[float, float] | None = None  # this update's change of x: before and after any cut
        self.unseen: tuple[float, float, float] | None = None  # the situation of a step that was not seen yet
        self.updates = 0

    @cached_property
    def _belief(self) -> Belief:
        """Made when it is first needed: it takes numpy, which checking a config does not."""
        from rlhf_kl.kl_controllers.belief import Belief, StepModel

        model = StepModel(self.momentum, self.distance_power, self.coef_power)
        return Belief(model, self.start_coef, self.min_coef, self.max_coef, USUAL_PACE)

    @property
    def holding_coef(self) -> float:
        """The beta that is believed to hold the target."""
        return self._belief.holding_coef

    def observe_update(self, kl_before: float, kl_after: float, kl_whole: float) -> None:
        before = self._distance_of(kl_before)
        self.seen = (self._distance_of(kl_whole) - before, self._distance_of(kl_after) - before)

    def update(self, kl: float, episodes: int) -> None:
        del episodes
        measured = self._distance_of(kl)
        if self.unseen is not None:
            self.step = measured - self.unseen[0]
            self._learn(self.step, self._situation(*self.unseen), blind=True)
        here = self._situation(self._fused(measured), self.step, math.log(self.coef))
        self.updates += 1
        if self.seen is not None:
            (whole, kept), self.unseen = self.seen, None
            self._learn(whole, here, blind=False)
        else:
            whole = kept = self._belief.mean_step(here)
            self.unseen = (here.distance, here.step, here.log_coef)
        self.seen = None
        self.distance, self.step = max(0.0, here.distance + kept), whole
        if self.updates > 1:
            self._move(self._best_move(self._situation(self.distance, self.step, math.log(self.coef))))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        del episodes
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

    @staticmethod
    def _situation(distance: float, step: float, log_coef: float) -> Situation:
        from rlhf_kl.kl_controllers.belief import Situation

        return Situation(distance, step, log_coef)

    def _fused(self, measured: float) -> float:
        """The distance, from its prediction and its measurement."""
        if self.distance is None or abs(measured - self.distance) > JUMP:
            return measured
        return self.distance + TRUST * (measured - self.distance)

    def _learn(self, step: float, at: Situation, *, blind: bool) -> None:
        """Learn from a step that was seen; `blind` where it was worked out from the next measurement."""
        belief = self._belief
        first = self.updates <= 1  # a blind one is learnt an update later, when `updates` is already up by one
        guess = clip(abs(step) / FIRST_STEP, *PACE_BOUNDS)
        if guess > belief.pace or (first and at.distance < JUMP):
            belief.pace = guess
        if first:
            return
        noise = NOISE * belief.pace + BLIND_NOISE * blind
        missed = clip(step - belief.mean_step(at), -2.0 * noise, 2.0 * noise)  # an odd update is no trend
        self.offset += OFFSET_RATE * (missed - self.offset)
        belief.hear(step, at, noise)

    def _best_move(self, at: Situation) -> float:
        """The change of log beta after which the next step is expected to end nearest to where it should."""
        hardest = HARDEST * self._belief.mean_pace
        wanted = clip(self.approach * (1.0 - at.distance), -hardest, hardest) - self.offset
        width = (self.down + self.up) / (CANDIDATES - 1)
        moves = sorted([0.0, *(i * width - self.down for i in range(CANDIDATES))], key=abs)  # of equals the least
        return min(moves, key=lambda move: self._belief.distance_from(wanted, at._replace(log_coef=at.log_coef + move)))
