"""Proportional and integral control of where the KL is heading, for updates that carry much momentum."""

from __future__ import annotations

import math

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive

FULL_PACE = 0.67  # share of the pace at which the policy counts as moving as fast as it can
FORGET = 0.01  # of the pace, per update: the drive weakens as the score saturates
LEAST_PACE = 1e-3


class ForecastKL(KLController):
    """Steers by the forecast of x = sqrt(KL/target), `horizon` updates ahead.

        z = clip(x + horizon v - 1, -1, 1) g,    log c += rate z,    log beta = log c + gain z

    x and its change v per update come from an alpha-beta filter of the measured KL (Benedict & Bordner 1962),
    which follows a ramp without delay: a KL that is estimated from samples is noisy. Under Adam with one optimizer
    step a rollout a change of beta shows after many updates (momentum 0.9: half after 7), so the forecast, and not
    the last KL, is what an integral may add up.

    g lies between 0 and 1, and is 0 where the policy already moves toward the target as fast as it can: there beta
    has no effect on the pace, so pushing further would only wind the integral up. The pace is the largest |v| seen.
    So a cold start, where the KL is low whatever beta is, leaves beta nearly alone. |change of log beta| <= `step`.
    """

    state_names = ("coef", "centre", "distance", "speed", "pace")

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        gain: float = 3.0,
        rate: float = 0.4,
        horizon: float = 6.0,
        smoothing: float = 0.3,
        step: float = 0.7,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        """`smoothing`: the weight that the filter keeps on its own prediction; 0 = no filter."""
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.gain, self.rate = require_positive("gain", gain), require_positive("rate", rate)
        self.horizon, self.step = require_positive("horizon", horizon), require_positive("step", step)
        self.alpha = 1.0 - require_fraction("smoothing", smoothing)
        self.centre = math.log(self.coef)  # log c
        self.distance: float | None = None  # x
        self.speed = 0.0  # v
        self.pace = LEAST_PACE

    def update(self, kl: float, episodes: int) -> None:
        self._track(math.sqrt(max(kl, 0.0) / self.target))
        assert self.distance is not None
        error = clip(self.distance + self.horizon * self.speed - 1.0, -1.0, 1.0)
        approaching = -self.speed if error > 0.0 else self.speed
        error *= 1.0 - clip(approaching / (FULL_PACE * self.pace), 0.0, 1.0)
        self.centre = clip(self.centre + self.rate * error, math.log(self.min_coef), math.log(self.max_coef))
        wanted = self.centre + self.gain * error
        self._move(clip(wanted - math.log(self.coef), -self.step, self.step))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.step, self.step

    def _track(self, measured: float) -> None:
        """The alpha-beta filter, with the beta that is best for its alpha."""
        if self.distance is None:
            self.distance = measured
            return
        predicted = self.distance + self.speed
        error = measured - predicted
        self.distance = max(0.0, predicted + self.alpha * error)
        self.speed += self.alpha**2 / (2.0 - self.alpha) * error
        self.pace = max((1.0 - FORGET) * self.pace, abs(self.speed))
