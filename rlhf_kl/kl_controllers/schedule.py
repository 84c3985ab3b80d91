"""beta as a function of progress, independent of the KL."""

from __future__ import annotations

import math

from rlhf_kl.kl_controllers.base import COEF_SPAN, KLController, require_positive

SHAPES = ("constant", "linear", "cosine")


class ScheduledKL(KLController):
    """beta_k = coef + (end_coef - coef) * f(p), p = episodes so far / total_episodes in [0, 1].

    f(p) is 0 (`constant`), p (`linear`) or (1 - cos(pi p)) / 2 (`cosine`). By default end_coef is
    3 * coef: looser early, so that the policy learns, tighter late. Open loop: it holds no target.
    """

    state_names = ("coef", "episodes_seen")
    adjusts = False

    def __init__(
        self,
        *,
        total_episodes: int,
        coef: float = 0.1,
        end_coef: float | None = None,
        shape: str = "linear",
    ) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        self.shape = shape
        self.start_coef = require_positive("coef", coef)
        self.end_coef = 3.0 * self.start_coef if end_coef is None else require_positive("end_coef", end_coef)
        if shape == "constant":
            self.end_coef = self.start_coef
        self.total_episodes = require_positive("total_episodes", total_episodes)
        self.episodes_seen = 0
        self.coef = self.start_coef
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
