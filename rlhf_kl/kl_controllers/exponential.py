"""Exponential feedback on the error in nats."""

from __future__ import annotations

from rlhf_kl.kl_controllers.base import KLController, require_fraction, require_positive


class ExponentialKL(KLController):
    """beta *= exp(gain * (KL - target)), the KL optionally smoothed: m = s*m + (1-s)*KL, m_1 = KL_1.

    The exponentiated-gradient form of dual ascent, in tutorials with gain 0.1. The error is in
    nats, so a gain is right for one unit and target only: 0.1 against an error of 0.1 nats moves beta by
    1 % per update.
    """

    state_names = ("coef", "mean_kl")

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        gain: float = 0.1,
        smoothing: float = 0.0,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.gain = require_positive("gain", gain)
        self.smoothing = require_fraction("smoothing", smoothing)
        self.mean_kl: float | None = None

    def update(self, kl: float, episodes: int) -> None:
        old = kl if self.mean_kl is None else self.mean_kl
        self.mean_kl = self.smoothing * old + (1.0 - self.smoothing) * kl
        self._move(self.gain * (self.mean_kl - self.target))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.gain * self.target, self.gain * self.target
