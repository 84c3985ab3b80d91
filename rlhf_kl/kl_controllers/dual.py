"""Dual ascent on the multiplier of the constraint KL <= target."""

from __future__ import annotations

from rlhf_kl.kl_controllers.base import KLController, require_positive


class DualKL(KLController):
    """beta += lr * (KL/target - 1), projected into the bounds.

    beta is the Lagrange multiplier of max E[score] subject to KL <= target; this is the projected
    gradient step on the dual (Boyd & Vandenberghe 2004, section 5; for policies Stooke et al. 2020,
    2007.03964, eq. 4, who show why an integral alone oscillates). The error is relative, so that lr does
    not depend on the unit; the step is additive, so lr is in units of beta.
    """

    state_names = ("coef",)

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        lr: float = 0.02,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.lr = require_positive("lr", lr)

    def update(self, kl: float, episodes: int) -> None:
        self._set_coef(self.coef + self.lr * (kl / self.target - 1.0))

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        span = self.lr * updates
        return max(self.min_coef, self.coef - span), min(self.max_coef, self.coef + span)
