"""The learning rate: its schedule, and `ppo.lr_schedule: adaptive`, a factor for a rate that no beta can correct.

A rate that is too high moves the policy past the target in one update, and the noise of its steps adds a KL that no
beta removes. With a rate that is too low the policy never reaches the target. The rule is that of robotics PPO (Rudin
et al. 2022, 2109.11978, rsl_rl; torchrl's KLAdaptiveLR), which keeps the KL between successive policies in a band.
Here the rate is lowered at once if one update goes too far. Otherwise it changes only if the controller has failed.
"""

from __future__ import annotations

import math
from typing import Any

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers import KLController
from rlhf_kl.optim import lr_factor
from rlhf_kl.ppo.ceiling import CeilingResult

FACTOR_BOUNDS = (0.01, 10.0)
LARGE_STEP = 0.5  # of x = sqrt(KL/target) in one update
LARGE_MOVE, USUAL_MOVE = 0.05, 0.025  # KL of the policies of an update to the one that sampled, over the target
PATIENCE = 4  # updates without success before the rate is changed, and between two changes
OFF_TARGET = 0.25
LEAST, LOWER, RAISE = 0.2, 0.5, (1.5, 5.0)  # factors of one change
RISING = 1.02  # while beta grows by more per update, it may still reach the target alone
IN_TIME = 6.0  # the target should be reached within 1/IN_TIME of the remaining updates


class AdaptiveRate:
    """The factor of the learning rate over its schedule; observes every update."""

    def __init__(self, target: float, updates: int, first: int = 1) -> None:
        """`target` in the unit of the KLs that are observed; `updates` in the whole run.

        `first`: the first update that trains the policy.
        """
        self.target, self.updates, self.first = target, updates, first
        self.factor = 1.0
        self.seen: list[tuple[float, bool]] = []  # since the last change: x, and whether the ceiling cut the update
        self.stuck = False  # at a bound, and reported

    def observe(
        self, update: int, move: CeilingResult, *, update_kl: float, spent: bool, growth: float
    ) -> dict[str, Any]:
        """After update number `update`, before any cut of the ceiling.

        `update_kl`: the mean KL to the policy that sampled, over the optimizer's steps, which also shows moves at a
        constant KL to the reference; it grows with the square of the rate.
        `spent`: a lower beta would not move the policy farther. `growth`: beta of the next update over this one's.

        Returns a fact for the monitors if the factor has changed or, once, if its bound keeps it from changing.
        """
        kl, kl_uncut = move.kl_before, move.kl_uncut
        if not (math.isfinite(kl) and math.isfinite(kl_uncut)):
            return {}
        here, there = (math.sqrt(max(0.0, value) / self.target) for value in (kl, kl_uncut))
        self.seen = [*self.seen[1 - PATIENCE :], (here, move.factor < 1.0)]
        if abs(there - here) > LARGE_STEP:
            by = max(LEAST, min(LOWER, LARGE_STEP / abs(there - here)))
            return self._change(by, f"an update moved the KL from {kl:.3g} to {kl_uncut:.3g} nats")
        # Adam's first steps are the largest at any rate.
        if update > self.first and update_kl > LARGE_MOVE * self.target:
            by = max(LEAST, math.sqrt(USUAL_MOVE * self.target / update_kl))
            return self._change(by, f"the policy moved {update_kl / self.target:.0%} of the target in one update")
        if len(self.seen) < PATIENCE:
            return {}
        recent, falls = self.seen, there < self.seen[0][0]
        above = all(x * x > 1.0 + OFF_TARGET for x, _ in recent) and not falls
        if growth < RISING and (above or sum(cut for _, cut in recent) > PATIENCE / 2):
            return self._change(LOWER, f"for {PATIENCE} updates beta has not held the KL at its target")
        if spent and all(x * x < 1.0 - OFF_TARGET for x, _ in recent):
            way, reach = 1.0 - there, (there - recent[0][0]) / PATIENCE * (self.updates - update) / IN_TIME
            if way > reach:
                needed = way / max(reach, 1e-9)
                # The nearer the target, the smaller the change: by then a slow stretch may be noise.
                by = min(max(needed, RAISE[0]), max(RAISE[0], RAISE[1] ** way))
                return self._change(by, f"at this pace the target takes more than 1/{IN_TIME:.0f} of the updates left")
        return {}

    def _change(self, by: float, why: str) -> dict[str, Any]:
        before = self.factor
        self.factor = min(max(self.factor * by, FACTOR_BOUNDS[0]), FACTOR_BOUNDS[1])
        self.seen = []
        if self.factor != before:
            self.stuck = False
            return {"learning-rate-changed": {"why": why, "factor": self.factor}}
        reported, self.stuck = self.stuck, True
        change = "raise" if by > 1 else "lower"
        return {} if reported else {"learning-rate-at-bound": {"why": why, "factor": self.factor, "change": change}}

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "seen": [list(pair) for pair in self.seen], "stuck": self.stuck}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = float(state["factor"])
        self.seen = [(x, cut) for x, cut in state["seen"]]
        self.stuck = bool(state["stuck"])


class LearningRate:
    """The rate of each update: the peak times the schedule, and times the adaptive factor if there is one."""

    def __init__(self, config: TrainConfig, peak: float, controller: KLController) -> None:
        """`controller`: of the KL; a constant beta leaves the rate to its schedule."""
        self.config, self.peak, self.controller = config, peak, controller
        self.adaptive: AdaptiveRate | None = None
        if config.ppo.lr_schedule == "adaptive" and controller.adjusts:
            self.adaptive = AdaptiveRate(config.kl.target_value, config.updates, config.ppo.value_warmup + 1)

    def __call__(self, step: int) -> float:
        """The rate of update `step` (from 1)."""
        factor = lr_factor(self.config.ppo.lr_schedule, (step - 1) / self.config.updates)
        return self.peak * factor * (1.0 if self.adaptive is None else self.adaptive.factor)

    def update(self, step: int, move: CeilingResult, update_kl: float, growth: float) -> dict[str, Any]:
        """After update `step`: choose the next rate, and tell it to the controller. Returns facts for the monitors.

        `update_kl` and `growth`: see `AdaptiveRate.observe`.
        """
        before = self(step)
        facts = {}
        if self.adaptive is not None:
            facts = self.adaptive.observe(step, move, update_kl=update_kl, spent=self.controller.spent, growth=growth)
        self.controller.change_rate(self(step + 1) / before)
        return facts

    def state_dict(self) -> dict[str, Any]:
        return {"peak": self.peak, "adaptive": None if self.adaptive is None else self.adaptive.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.peak = state["peak"]
        if self.adaptive is not None:
            self.adaptive.load_state_dict(state["adaptive"])
