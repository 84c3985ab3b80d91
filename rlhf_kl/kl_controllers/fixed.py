"""A constant beta."""

from __future__ import annotations

from rlhf_kl.kl_controllers.base import KLController, require_number


class FixedKL(KLController):
    """beta_k = coef, whatever the KL does (Stiennon et al. 2020, 2009.01325). 0 turns the term off."""

    state_names = ("coef",)
    adjusts = False

    def __init__(self, *, coef: float = 0.1) -> None:
        if require_number("coef", coef) < 0.0:
            raise ValueError(f"coef must not be negative, got {coef!r}")
        self.coef = float(coef)

    def update(self, kl: float, episodes: int) -> None:
        """Changes nothing."""

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        return self.coef, self.coef
