"""Changes beta by a factor if the KL leaves a band around the target."""

from __future__ import annotations

import math

from rlhf_kl.kl_controllers.base import KLController, require_positive


class ThresholdKL(KLController):
    """KL > high * target: beta *= factor; KL < low * target: beta /= factor; between them no change.

    The rule tutorials use for the KL to the reference, with 1.5, 0.5 and factor 1.5. (The KL penalty of
    Schulman et al. 2017, section 4, has this form for old policy against new: 1.5, 1/1.5, factor 2.)
    At a cold start the KL is 0, so it lowers beta until the KL is up, and then reacts late.
    """

    state_names = ("coef",)

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.02,
        high: float = 1.5,
        low: float = 0.5,
        factor: float = 1.5,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.high, self.low = require_positive("high", high), require_positive("low", low)
        self.factor = require_positive("factor", factor)
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.factor <= 1.0:
            raise ValueError(f"factor must be above 1, got {self.factor:g}")

    def update(self, kl: float, episodes: int) -> None:
        if kl > self.high * self.target:
            self._set_coef(self.coef * self.factor)
        elif kl < self.low * self.target:
            self._set_coef(self.coef / self.factor)

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return math.log(self.factor), math.log(self.factor) if self.high < 2.0 else 0.0
