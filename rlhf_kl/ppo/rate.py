"""The learning rate: its schedule, and `ppo.lr_schedule: adaptive`, which paces the way to the KL target.

How fast a policy leaves its reference depends on the rate: well below the beta that holds the target, a lower beta no
longer moves it farther. So while the target is far, the rate is chosen from the steps that were measured, such that
x = sqrt(KL/target) reaches 1 in a planned number of updates. Near the target beta holds the KL, and the rate only
falls: where its steps are too long for a hold, or where one update goes too far. (Robotics PPO keeps the KL between
successive policies in a band by the rate: Rudin et al. 2022, 2109.11978.)
"""

from __future__ import annotations

import math
from typing import Any

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers import KLController
from rlhf_kl.kl_controllers.base import clip
from rlhf_kl.ops.masked import Mean
from rlhf_kl.optim import lr_factor
from rlhf_kl.ppo.ceiling import CeilingResult

PLANNED_SHARE = 0.1  # of the run: updates until the target is reached,
PLANNED_UPDATES = (4, 10)  # at least and at most
NEAR = 0.9  # of x: from there on the rate only falls,
BACK = 0.75  # unless the next rollout is below this
LATE = 2  # updates for the rest of the way, after the plan
FIRST_STEP = 2.5  # Adam's first step over the later ones
FACTOR_BOUNDS = (0.01, 10.0)
CHANGE_BOUNDS = (0.25, 6.0)  # of the factor in one update on the way
HOLDING_PACE = 0.08  # of x in an update: the longest steps of a policy that is held
HOLDING_FACTOR = 3.0  # the noise of longer steps costs score
LARGE_STEP = 0.5  # of x in one update near the target
LARGE_MOVE, USUAL_MOVE = 0.05, 0.025  # KL of an update's policies to the one that sampled, over the target
LEAST = 0.2  # one update is no proof of more
SPENT = 0.5  # of x: from there on the score must have risen,
SURE_RISE = 1.0  # by so many standard errors: more would stop noisy rewards that do rise,
RECENT = 0.15  # in a moving average with at least this weight of the newest rollout,
PATIENCE = 3  # of so many rollouts


class Progress:
    """Whether the score has risen by more than its noise: KL that is spent without that is no progress."""

    def __init__(self, start: Mean | None) -> None:
        """`start`: the shaped score of the reference; None = not known, so any KL is progress."""
        self.start = start
        self.count = 0  # rollouts in a row with x from SPENT on,
        self.score = Mean(0.0, 0.0)  # and their moving average
        self.made, self.told = True, False

    def observe(self, score: Mean, distance: float) -> dict[str, Any]:
        """After a rollout at x = `distance`. Returns a fact for the monitors when the score has not risen, once."""
        self.count = self.count + 1 if distance >= SPENT and self.start is not None else 0
        if self.start is None or not self.count:
            self.made = True
            return {}
        new = max(RECENT, 1.0 / self.count)
        mean, stderr = (
            new * score.mean + (1.0 - new) * self.score.mean,
            (new * score.stderr, (1.0 - new) * self.score.stderr),
        )
        self.score = Mean(mean, math.hypot(*stderr))
        rise, noise = mean - self.start.mean, math.hypot(self.score.stderr, self.start.stderr)
        self.made = self.count < PATIENCE or rise > SURE_RISE * noise
        if self.made or self.told:
            return {}
        self.told = True
        return {"no-progress": {"kl": distance**2, "rise": rise, "noise": noise}}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "score": list(self.score), "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.score, self.told = state["count"], Mean(*state["score"]), state["told"]


class PacedRate:
    """The factor of the learning rate over its schedule; observes every update."""

    def __init__(self, target: float, updates: int, first: int = 1) -> None:
        """`target` in the unit of the KLs that are observed; `updates` in the whole run.

        `first`: the first update that trains the policy.
        """
        self.target, self.first = target, first
        self.plan = first - 1 + round(clip(PLANNED_SHARE * updates, *PLANNED_UPDATES))  # the update that arrives
        self.factor = 1.0
        self.pace: float | None = None  # of x in an update at a factor of 1
        self.near = False  # the target was reached
        self.stuck = False  # the rate is at its bound, and that was reported

    def observe(self, update: int, move: CeilingResult, update_kl: float, *, progress: bool = True) -> dict[str, Any]:
        """After update number `update`, before any cut of the ceiling. Without `progress` the rate does not rise.

        `update_kl`: the mean KL to the policy that sampled, over the optimizer's steps, which also shows moves at a
        constant KL to the reference; it grows with the square of the rate.
        Returns a fact for the monitors if an update went too far or, once, if the bound keeps the target out of reach.
        """
        if not (math.isfinite(move.kl_before) and math.isfinite(move.kl_uncut)):
            return {}
        sure = move.kl_uncut - move.change_stderr  # one heavy response is no long way
        here, there, surely = (math.sqrt(max(0.0, kl) / self.target) for kl in (move.kl_before, move.kl_uncut, sure))
        step = abs(there - here)
        self.near = self.near and here >= BACK  # the KL at the states of an update can be far above the next rollout's
        if not self.near:
            pace = abs(surely - here) / self.factor / (FIRST_STEP if update == self.first else 1.0)
            self.pace = pace if self.pace is None else min(pace, (pace + self.pace) / 2)
        self.near = self.near or surely >= NEAR
        return self._hold(update, step, move, update_kl) if self.near else self._approach(update, surely, progress)

    def _approach(self, update: int, there: float, progress: bool) -> dict[str, Any]:
        wanted = (1.0 - there) / (self.plan - update if update < self.plan else LATE)
        change = clip(wanted / max(1e-6, (self.pace or 0.0) * self.factor), *CHANGE_BOUNDS)
        self.factor = clip(self.factor * (change if progress else min(1.0, change)), *FACTOR_BOUNDS)
        if self.stuck or update < 2 * self.plan or self.factor < FACTOR_BOUNDS[1]:
            return {}
        self.stuck = True
        why = f"after {update} updates the KL is at {there * there:.0%} of its target"
        return {"learning-rate-at-bound": {"why": why, "factor": self.factor, "change": "raise"}}

    def _hold(self, update: int, step: float, move: CeilingResult, update_kl: float) -> dict[str, Any]:
        self.factor = min(self.factor, HOLDING_FACTOR, HOLDING_PACE / max(1e-6, self.pace or 0.0))
        by, why = 1.0, ""
        if step > LARGE_STEP:
            by, why = LARGE_STEP / step, f"an update moved the KL from {move.kl_before:.3g} to {move.kl_uncut:.3g} nats"
        elif update > self.first and update_kl > LARGE_MOVE * self.target:
            by = math.sqrt(USUAL_MOVE * self.target / update_kl)
            why = f"the policy moved {update_kl / self.target:.0%} of the target in one update"
        if not why:
            return {}
        self.factor = max(FACTOR_BOUNDS[0], self.factor * max(LEAST, by))
        return {"learning-rate-changed": {"why": why, "factor": self.factor}}

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "pace": self.pace, "near": self.near, "stuck": self.stuck}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.pace = state["factor"], state["pace"]
        self.near, self.stuck = state["near"], state["stuck"]


class LearningRate:
    """The rate of each update: the peak times the schedule, and times the adaptive factor if there is one."""

    def __init__(self, config: TrainConfig, peak: float, controller: KLController) -> None:
        """`controller`: of the KL; a constant beta leaves the rate to its schedule."""
        self.config, self.peak, self.controller = config, peak, controller
        self.adaptive: PacedRate | None = None
        if config.ppo.lr_schedule == "adaptive" and controller.adjusts:
            self.adaptive = PacedRate(config.kl.target_value, config.updates, config.ppo.value_warmup + 1)

    def __call__(self, step: int) -> float:
        """The rate of update `step` (from 1)."""
        factor = lr_factor(self.config.ppo.lr_schedule, (step - 1) / self.config.updates)
        return self.peak * factor * (1.0 if self.adaptive is None else self.adaptive.factor)

    def update(self, step: int, move: CeilingResult, update_kl: float, *, progress: bool) -> dict[str, Any]:
        """After update `step`: choose the next rate, and tell it to the controller. Returns facts for the monitors.

        `update_kl`, `progress`: see `PacedRate.observe`.
        """
        before = self(step)
        facts = {} if self.adaptive is None else self.adaptive.observe(step, move, update_kl, progress=progress)
        self.controller.change_rate(self(step + 1) / before)
        return facts

    def state_dict(self) -> dict[str, Any]:
        return {"peak": self.peak, "adaptive": None if self.adaptive is None else self.adaptive.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.peak = state["peak"]
        if self.adaptive is not None:
            self.adaptive.load_state_dict(state["adaptive"])
