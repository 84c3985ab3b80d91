"""The laws of the literature and of tutorials, the simplest first. Each moves beta after every rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from rlhf_kl.control.base import COEF_SPAN, Fraction, Law, NonNegative, Positive, clip

Count: TypeAlias = Annotated[int, Field(ge=1)]


class FixedKL(Law):
    """beta_k = coef, whatever the KL does (Stiennon et al. 2020, 2009.01325). 0 turns the term off."""

    state_names = ("coef",)
    adjusts = False

    def __init__(self, *, coef: NonNegative = 0.1) -> None:
        self.coef = coef
        self.check_options(FixedKL)

    def update(self, kl: float, episodes: int) -> None:
        """Changes nothing."""

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        return self.coef, self.coef


class ScheduledKL(Law):
    """beta_k = coef + (end_coef - coef) * f(p), p = episodes so far / total_episodes in [0, 1].

    f(p) is 0 (`constant`), p (`linear`) or (1 - cos(pi p)) / 2 (`cosine`). By default end_coef is
    3 * coef: looser early, so that the policy learns, tighter late. Open loop: it holds no target.
    """

    state_names = ("coef", "episodes_seen")
    adjusts = False

    def __init__(
        self,
        *,
        total_episodes: Count,
        coef: Positive = 0.1,
        end_coef: Positive | None = None,
        shape: Literal["constant", "linear", "cosine"] = "linear",
    ) -> None:
        self.total_episodes = total_episodes
        self.coef = coef
        self.end_coef = 3.0 * coef if end_coef is None else end_coef
        self.shape = shape
        self.check_options(ScheduledKL)
        self.start_coef = self.coef
        if shape == "constant":
            self.end_coef = self.start_coef
        self.episodes_seen = 0
        # Around both ends: the whole schedule is inside the bounds, and a rollback can raise it.
        low, high = sorted((self.start_coef, self.end_coef))
        self.min_coef, self.max_coef = COEF_SPAN[0] * low, COEF_SPAN[1] * high

    def update(self, kl: float, episodes: int) -> None:
        self.episodes_seen += episodes
        progress = min(1.0, self.episodes_seen / self.total_episodes)
        share = progress if self.shape == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
        self.coef = self.start_coef + (self.end_coef - self.start_coef) * share

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        return min(self.start_coef, self.end_coef), max(self.start_coef, self.end_coef)


@dataclass(kw_only=True, eq=False)
class ZieglerKL(Law):
    """beta *= 1 + clip(KL/target - 1, -clip_error, clip_error) * n / horizon, n = episodes of this update.

    Source: Ziegler et al. 2019 (1909.08593), section 2.2, with clip_error 0.2 and horizon 10000. On
    log(beta) it is a pure integrator: late and overshooting. The horizon must fit the run: 10000 lets a
    run of 6400 episodes move beta by 1.14x at most. `auto` is total_episodes / 20, at least one batch.
    One departure: a single update multiplies beta by at least 1/2 and at most 2, since the published
    rule makes beta negative once n exceeds horizon / clip_error.
    """

    target: Positive = 0.1
    horizon: Positive | Literal["auto"] = "auto"
    clip_error: Positive = 0.2
    total_episodes: Count | None = None
    batch_size: int = 1

    state_names = ("coef",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon == "auto":
            if self.total_episodes is None:
                raise ValueError("horizon: auto needs total_episodes")
            self.horizon = max(float(self.batch_size), self.total_episodes / 20.0)

    def update(self, kl: float, episodes: int) -> None:
        error = clip(self._finite(kl) / self.target - 1.0, -self.clip_error, self.clip_error)
        self._set_coef(self.coef * self._factor(error, episodes))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        low, high = (self._factor(sign * min(self.clip_error, 1.0), episodes) for sign in (-1.0, 1.0))
        return -math.log(low), math.log(high)

    def _factor(self, error: float, episodes: int) -> float:
        return clip(1.0 + error * episodes / float(self.horizon), 0.5, 2.0)


@dataclass(kw_only=True, eq=False)
class ThresholdKL(Law):
    """KL > high * target: beta *= factor; KL < low * target: beta /= factor; between them no change.

    The rule tutorials use for the KL to the reference, with 1.5, 0.5 and factor 1.5. (The KL penalty of
    Schulman et al. 2017, section 4, has this form for old policy against new: 1.5, 1/1.5, factor 2.)
    At a cold start the KL is 0, so it lowers beta until the KL is up, and then reacts late.
    """

    target: Positive = 0.02
    high: Positive = 1.5
    low: Positive = 0.5
    factor: Annotated[float, Field(gt=1)] = 1.5

    state_names = ("coef",)

    @staticmethod
    def conflicts(options: Mapping[str, Any]) -> list[str]:
        low, high = options["low"], options["high"]
        return [] if low < high else [f"low {low:g} must be below high {high:g}"]

    def update(self, kl: float, episodes: int) -> None:
        if self._finite(kl) > self.high * self.target:
            self._set_coef(self.coef * self.factor)
        elif kl < self.low * self.target:
            self._set_coef(self.coef / self.factor)

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return math.log(self.factor), math.log(self.factor) if self.high < 2.0 else 0.0


@dataclass(kw_only=True, eq=False)
class ExponentialKL(Law):
    """beta *= exp(gain * (KL - target)), the KL optionally smoothed: m = s*m + (1-s)*KL, m_1 = KL_1.

    The exponentiated-gradient form of dual ascent, in tutorials with gain 0.1. The error is in
    nats, so a gain is right for one unit and target only: 0.1 against an error of 0.1 nats moves beta by
    1 % per update.
    """

    target: Positive = 0.1
    gain: Positive = 0.1
    smoothing: Fraction = 0.0

    state_names = ("coef", "mean_kl")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean_kl: float | None = None

    def update(self, kl: float, episodes: int) -> None:
        old = kl if self.mean_kl is None else self.mean_kl
        self.mean_kl = self.smoothing * old + (1.0 - self.smoothing) * self._finite(kl)
        self._move(self.gain * (self.mean_kl - self.target))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.gain * self.target, self.gain * self.target


@dataclass(kw_only=True, eq=False)
class DualKL(Law):
    """beta += lr * (KL/target - 1), projected into the bounds.

    beta is the Lagrange multiplier of max E[score] subject to KL <= target; this is the projected
    gradient step on the dual (Boyd & Vandenberghe 2004, section 5; for policies Stooke et al. 2020,
    2007.03964, eq. 4, who show why an integral alone oscillates). The error is relative, so that lr does
    not depend on the unit; the step is additive, so lr is in units of beta.
    """

    target: Positive = 0.1
    lr: Positive = 0.02

    state_names = ("coef",)

    def update(self, kl: float, episodes: int) -> None:
        self._set_coef(self.coef + self.lr * (self._finite(kl) / self.target - 1.0))

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        span = self.lr * updates
        return max(self.bounds[0], self.coef - span), min(self.bounds[1], self.coef + span)


@dataclass(kw_only=True, eq=False)
class PIDKL(Law):
    """log beta = log beta_0 + kp*e + ki*sum(e) + kd*(e - e_prev), e = clip(m/target - 1, -1, 1).

    m is the smoothed KL. Source: Stooke, Achiam & Abbeel 2020 (2007.03964), section 5, there on the
    multiplier itself; here on its logarithm, so that beta stays positive and a gain means a relative
    change. `rate` limits |change of log beta| per update. Anti-windup: the sum does not change while a bound
    or the rate limit restricts the output and the error has the same direction. Cold start: the KL
    begins at 0 whatever beta is, so for the first `hold` updates an error below zero changes nothing.
    """

    target: Positive = 0.1
    kp: NonNegative = 0.5
    ki: NonNegative = 0.1
    kd: NonNegative = 0.5
    smoothing: Fraction = 0.0
    rate: Positive = 0.5
    hold: int = 3

    state_names = ("coef", "mean_kl", "total", "last_error", "updates")

    @staticmethod
    def conflicts(options: Mapping[str, Any]) -> list[str]:
        return [] if options["kp"] + options["ki"] > 0.0 else ["kp + ki must be above 0"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_coef = self.coef
        self.mean_kl: float | None = None
        self.total, self.updates = 0.0, 0
        self.last_error: float | None = None

    def update(self, kl: float, episodes: int) -> None:
        old = kl if self.mean_kl is None else self.mean_kl
        self.mean_kl = self.smoothing * old + (1.0 - self.smoothing) * self._finite(kl)
        error = clip(self.mean_kl / self.target - 1.0, -1.0, 1.0)
        change = 0.0 if self.last_error is None else error - self.last_error
        self.last_error = error
        self.updates += 1
        if self.updates <= self.hold and error < 0.0:
            return
        wanted = math.log(self.start_coef) + self.kp * error + self.ki * (self.total + error) + self.kd * change
        before = self.coef
        self._move(clip(wanted - math.log(before), -self.rate, self.rate))
        missing = wanted - math.log(before) - math.log(self.coef / before)
        if abs(missing) <= 1e-12 or missing * error <= 0.0:
            self.total += error

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.rate, self.rate
