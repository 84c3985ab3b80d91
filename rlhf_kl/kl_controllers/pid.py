"""A textbook PID on log(beta)."""

from __future__ import annotations

import math

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_number, require_positive


class PIDKL(KLController):
    """log beta = log beta_0 + kp*e + ki*sum(e) + kd*(e - e_prev), e = clip(m/target - 1, -1, 1).

    m is the smoothed KL. Source: Stooke, Achiam & Abbeel 2020 (2007.03964), section 5, there on the
    multiplier itself; here on its logarithm, so that beta stays positive and a gain means a relative
    change. `rate` limits |change of log beta| per update. Anti-windup: the sum does not change while a bound
    or the rate limit restricts the output and the error has the same direction. Cold start: the KL
    begins at 0 whatever beta is, so for the first `hold` updates an error below zero changes nothing.
    """

    state_names = ("coef", "mean_kl", "total", "last_error", "updates")

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        kp: float = 0.5,
        ki: float = 0.1,
        kd: float = 0.5,
        smoothing: float = 0.0,
        rate: float = 0.5,
        hold: int = 3,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.kp, self.ki, self.kd = (require_number(n, v) for n, v in (("kp", kp), ("ki", ki), ("kd", kd)))
        if min(self.kp, self.ki, self.kd) < 0.0 or self.kp + self.ki == 0.0:
            raise ValueError("kp, ki and kd must not be negative, and kp + ki must be above 0")
        self.smoothing = require_fraction("smoothing", smoothing)
        self.rate = require_positive("rate", rate)
        self.hold = require_number("hold", hold)
        self.start_coef = self.coef
        self.mean_kl: float | None = None
        self.total = 0.0
        self.last_error: float | None = None
        self.updates = 0

    def update(self, kl: float, episodes: int) -> None:
        old = kl if self.mean_kl is None else self.mean_kl
        self.mean_kl = self.smoothing * old + (1.0 - self.smoothing) * kl
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
