"""`ppo.lr_schedule: adaptive`: a factor on the learning rate, for a rate that no beta can make good.

A rate that is too high moves the policy past the target in one update, and the noise of its steps is a KL that no
beta takes back; one that is too low never arrives there. The rule is that of robotics PPO (Rudin et al. 2022,
2109.11978, rsl_rl; torchrl's KLAdaptiveLR), which keep the KL between successive policies in a band. Here a rate is
lowered at once where one update goes too far, and otherwise changed only where the controller of beta has failed.
"""

from __future__ import annotations

import math
from typing import Any

FACTOR_BOUNDS = (0.01, 10.0)
LARGE_STEP = 0.5  # of x = sqrt(KL/target) in one update
LARGE_MOVE, USUAL_MOVE = 0.05, 0.025  # KL of the policies of an update to the one that sampled, over the target
PATIENCE = 4  # updates without success before the rate is changed, and between two changes
OFF_TARGET = 0.25
LEAST, LOWER, RAISE = 0.2, 0.5, (1.5, 5.0)  # factors of one change
RISING = 1.02  # a beta that grows by more an update has not had its say yet
IN_TIME = 6.0  # the target is to be reached in so small a share of the updates that are left


class StepSize:
    """The factor of the learning rate over its schedule; observes every update."""

    def __init__(self, target: float, updates: int) -> None:
        """`target` in the unit of the KLs that are observed; `updates` in the whole run."""
        self.target, self.updates = target, updates
        self.factor = 1.0
        self.seen: list[tuple[float, bool]] = []  # since the last change: x, and whether the ceiling cut the update
        self.stuck = False  # at a bound, and said so

    def observe(
        self, update: int, kl: float, kl_uncut: float, *, moved: float, cut: bool, spent: bool, growth: float
    ) -> str:
        """After update number `update`, whose rollout had `kl` and which led to `kl_uncut` at the same states.

        `moved`: the mean KL to the policy that sampled, over the optimizer's steps, which shows what moved sideways
        too; it grows with the square of the rate. `cut`: the ceiling shortened the update. `spent`: a lower beta
        would not carry the policy farther. `growth`: beta of the next update over this one's. Returns an alert
        where the factor has changed or, once, where its bound keeps it from changing; else nothing.
        """
        if not (math.isfinite(kl) and math.isfinite(kl_uncut)):
            return ""
        here, there = (math.sqrt(max(0.0, value) / self.target) for value in (kl, kl_uncut))
        self.seen = [*self.seen[1 - PATIENCE :], (here, cut)]
        if abs(there - here) > LARGE_STEP:
            words = f"an update moved the KL from {kl:.3g} to {kl_uncut:.3g} nats"
            return self._change(max(LEAST, min(LOWER, LARGE_STEP / abs(there - here))), words)
        if update > 1 and moved > LARGE_MOVE * self.target:  # Adam's first steps are the largest at any rate
            words = f"the policy moved {moved / self.target:.0%} of the target in one update"
            return self._change(max(LEAST, math.sqrt(USUAL_MOVE * self.target / moved)), words)
        if len(self.seen) < PATIENCE:
            return ""
        recent, falls = self.seen, there < self.seen[0][0]
        above = all(x * x > 1.0 + OFF_TARGET for x, _ in recent) and not falls
        if growth < RISING and (above or sum(cut for _, cut in recent) > PATIENCE / 2):
            return self._change(LOWER, f"for {PATIENCE} updates beta has not held the KL at its target")
        if spent and all(x * x < 1.0 - OFF_TARGET for x, _ in recent):
            way, reach = 1.0 - there, (there - recent[0][0]) / PATIENCE * (self.updates - update) / IN_TIME
            if way > reach:
                needed = way / max(reach, 1e-9)
                words = f"at this rate the target takes more than a {IN_TIME:.0f}th of the updates that are left"
                # The nearer the target, the smaller the change: by then a slow stretch may be noise.
                return self._change(min(max(needed, RAISE[0]), max(RAISE[0], RAISE[1] ** way)), words)
        return ""

    def _change(self, by: float, why: str) -> str:
        before, self.factor = self.factor, min(max(self.factor * by, FACTOR_BOUNDS[0]), FACTOR_BOUNDS[1])
        self.seen = []
        if self.factor != before:
            self.stuck = False
            return f"learning-rate-changed: {why}: it goes on with {self.factor:.3g} times the schedule's"
        told, self.stuck = self.stuck, True
        side, limit = ("raise", "highest") if by > 1.0 else ("lower", "lowest")
        words = f"learning-rate-at-bound: {why}, with the {limit} factor {self.factor:g}: {side} ppo.learning_rate"
        return "" if told else words

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"factor": self.factor, "seen": [list(pair) for pair in self.seen], "stuck": self.stuck}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.factor, self.seen = float(state["factor"]), [(x, cut) for x, cut in state["seen"]]
        self.stuck = bool(state["stuck"])
