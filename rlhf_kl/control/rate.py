"""The learning rate: its schedule, and `ppo.lr_schedule: adaptive`, which paces the way to the KL target.

How fast a policy leaves its reference depends on the rate: well below the beta that holds the target, a lower beta no
longer moves it farther. So while the target is far, the rate is chosen from the steps that were measured, such that
x = sqrt(KL/target) reaches 1 in a planned number of updates, unless one of these would move the policy farther than
`FARTHEST`. Near the target beta holds the KL, and the rate only falls: where its steps are too long for a hold, or
where one update goes too far. (Robotics PPO keeps the KL between successive policies in a band by the rate: Rudin et
al. 2022, 2109.11978.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlhf_kl.control.base import FIRST_STEP, SURE, clip
from rlhf_kl.control.ceiling import CeilingResult
from rlhf_kl.control.guard import Guard
from rlhf_kl.events import Event, LearningRateAtBound, LearningRateChanged, NoProgress
from rlhf_kl.ops.masked import Mean

# Chosen on runs of the built-in world and of TinyStories at rates from a twentieth to 25 times the usual one, such that
# 0.8 of the target is reached in about six updates and the score at the end is highest.
PLANNED_SHARE = 0.1  # of the run: updates until the target is reached,
PLANNED_UPDATES = (4, 10)  # at least and at most
NEAR = 0.9  # of x: from there on the rate only falls, unless a rollout is twice as far from the target
FACTOR_BOUNDS = (0.01, 10.0)
HOLDING_PACE = 0.04  # of x in an update: the longest steps of a policy that is held
# Of `update_kl`, the mean over an update's steps, each before it is taken: of four equal steps it is a quarter of the
# KL at the end, of a single one 0, which moves a policy least.
LARGE_MOVE = 0.05  # twice the usual one, over the target
FARTHEST = 0.02  # nats per token, on the way, whatever the target: as usual early stops
# Of `Progress`: rewards that are noise are found within a few updates, and no reward that was learned was stopped.
SPENT = 0.5  # of x: from there on the score must have risen by its noise,
LITTLE = 0.2  # or, for all that its noise tells, by this share of the most that the KL allows,
PATIENCE = 3  # after so many rollouts; the average is over about twice as many


class Progress:
    """Whether the score has risen by more than its noise: KL that is spent without that is no progress."""

    def __init__(self, start: Mean | None) -> None:
        """`start`: the shaped score of the reference; None = not known, so any KL is progress."""
        self.start = start
        self.count = 0  # rollouts in a row with x from SPENT on,
        self.score = Mean(0.0, 0.0)  # and their moving average
        self.made, self.told = True, False

    def observe(self, score: Mean, distance: float, most: float) -> list[Event]:
        """After a rollout at x = `distance`. Returns an event when the score has not risen, once.

        `most`: about the highest rise that its KL allows.
        """
        self.count = self.count + 1 if distance >= SPENT and self.start is not None else 0
        if self.start is None or not self.count:
            self.made = True
            return []
        new = max(0.5 / PATIENCE, 1.0 / self.count)
        mean, stderr = (
            new * score.mean + (1.0 - new) * self.score.mean,
            (new * score.stderr, (1.0 - new) * self.score.stderr),
        )
        self.score = Mean(mean, math.hypot(*stderr))
        rise, noise = mean - self.start.mean, math.hypot(self.score.stderr, self.start.stderr)
        self.made = self.count < PATIENCE or rise > noise or rise + SURE * noise > LITTLE * most
        if self.made or self.told:
            return []
        self.told = True
        return [NoProgress(distance**2, rise, noise)]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "score": list(self.score), "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.score, self.told = state["count"], Mean(*state["score"]), state["told"]


def allowed_rise(spread: float, kl: float) -> float:
    """About the most that a policy with this KL, nats per sequence, could raise the score.

    A tilt of Gaussian scores of this standard deviation (see `tilt`).
    """
    return spread * math.sqrt(2.0 * max(0.0, kl))


class PacedRate:
    """The factor of the learning rate over its schedule; sees the KL of every rollout, and every update."""

    def __init__(self, target: float, updates: int, first: int = 1) -> None:
        """`target` in the unit of the KLs that are observed; `updates` in the whole run.

        `first`: the first update that trains the policy.
        """
        self.target, self.first = target, first
        self.plan = first - 1 + round(clip(PLANNED_SHARE * updates, *PLANNED_UPDATES))  # the update that arrives
        self.factor = 1.0
        self.most = FACTOR_BOUNDS[1]  # of the factor: there an update moves the policy by FARTHEST
        self.distance: float | None = None  # x of the last rollout,
        self.used = 1.0  # and the factor of its update
        self.pace: float | None = None  # of x in an update at a factor of 1
        self.near = False  # the target was reached
        self.stuck = False  # the rate is at its bound, and that was reported

    def choose(self, update: int, kl: float, *, progress: bool = True) -> list[Event]:
        """Before update number `update`, whose rollout has this mean KL. Without `progress` the rate does not rise.

        Rollouts tell the pace, since the KL at the states of an update can rise much more than that of the next one.
        Returns an event, once, if the bound of the rate keeps the target out of reach.
        """
        distance = math.sqrt(max(0.0, kl) / self.target)
        if self.distance is not None and not self.near:
            pace = abs(distance - self.distance) / self.used / (FIRST_STEP if update == self.first + 1 else 1.0)
            self.pace = pace if self.pace is None else (pace + self.pace) / 2  # one rollout is no standstill
        self.distance, self.near = distance, 1.0 - distance <= (1.0 - NEAR) * (2.0 if self.near else 1.0)
        events: list[Event] = []
        if self.near:
            holding = HOLDING_PACE / max(1e-6, self.pace or 0.0)
            self.factor = max(FACTOR_BOUNDS[0], min(self.factor, holding))
        elif self.pace is not None:
            events = self._approach(update, distance, self.pace, progress)
        self.used = self.factor
        return events

    def observe(self, update: int, move: CeilingResult, update_kl: float, tokens: float = 1.0) -> list[Event]:
        """After the update, before any cut of the ceiling: near the target one that went too far lowers the rate.

        `update_kl`: the mean KL to the policy that sampled, before each of the optimizer's steps, which also shows
        moves at a constant KL to the reference; it grows with the square of the rate. NaN: no step was taken, so the
        next rollout tells no pace. `tokens`: in what the unit counts. Returns an event if it did.
        """
        if math.isnan(update_kl):
            self.distance = None
        if not (math.isfinite(move.kl_before) and math.isfinite(move.kl_uncut)):
            return []
        moved = update_kl / tokens / (FIRST_STEP**2 if update == self.first else 1.0)
        if math.isfinite(moved):
            self.most = clip(self.used * math.sqrt(FARTHEST / max(1e-9, moved)), *FACTOR_BOUNDS)
        there = math.sqrt(max(0.0, move.kl_uncut) / self.target)
        share = moved * tokens / self.target
        if max(there, self.distance or 0.0) < NEAR or not share > LARGE_MOVE:
            return []
        self.factor = max(FACTOR_BOUNDS[0], self.factor * math.sqrt(LARGE_MOVE / 2 / share))
        return [LearningRateChanged(f"an update's KL to the policy before is {share:.0%} of the target", self.factor)]

    def _approach(self, update: int, distance: float, pace: float, progress: bool) -> list[Event]:
        wanted = (1.0 - distance) / max(1, self.plan + 1 - update)
        change = wanted / max(1e-6, pace * self.factor)
        self.factor = clip(self.factor * (change if progress else min(1.0, change)), FACTOR_BOUNDS[0], self.most)
        if self.stuck or update <= 2 * self.plan or self.factor < FACTOR_BOUNDS[1]:
            return []
        self.stuck = True
        why = f"after {update - 1} updates the KL is at {distance * distance:.0%} of its target"
        return [LearningRateAtBound(why, self.factor)]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("factor", "most", "distance", "used", "pace", "near", "stuck")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class LearningRate:
    """The rate of each update: the peak times the schedule, and times the adaptive factor if there is one."""

    def __init__(
        self, controller: Guard, peak: float, schedule: Callable[[float], float], updates: int, paced: PacedRate | None
    ) -> None:
        """`controller`: of the KL; it is told of every change. `schedule`: the factor at a share of the run.

        `paced`: of `lr_schedule: adaptive`; a constant beta leaves the rate to its schedule.
        """
        self.controller, self.peak, self.schedule, self.updates = controller, peak, schedule, updates
        self.last: float | None = None  # the rate of the update before
        self.adaptive = paced if controller.adjusts else None

    def __call__(self, step: int) -> float:
        """The rate of update `step` (from 1)."""
        factor = self.schedule((step - 1) / self.updates)
        return self.peak * factor * (1.0 if self.adaptive is None else self.adaptive.factor)

    def choose(self, step: int, kl: float, *, progress: bool) -> list[Event]:
        """Before update `step`: choose its rate, and tell it to the controller. Returns events.

        `kl`, `progress`: see `PacedRate.choose`.
        """
        events = [] if self.adaptive is None else self.adaptive.choose(step, kl, progress=progress)
        rate = self(step)
        if self.last:
            self.controller.change_rate(rate / self.last)
        self.last = rate
        return events

    def observe(self, step: int, move: CeilingResult, update_kl: float, tokens: float) -> list[Event]:
        """After update `step`. Returns events; see `PacedRate.observe`."""
        return [] if self.adaptive is None else self.adaptive.observe(step, move, update_kl, tokens)

    def state_dict(self) -> dict[str, Any]:
        adaptive = None if self.adaptive is None else self.adaptive.state_dict()
        return {"peak": self.peak, "last": self.last, "adaptive": adaptive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.peak, self.last = state["peak"], state["last"]
        if self.adaptive is not None:
            self.adaptive.load_state_dict(state["adaptive"])
