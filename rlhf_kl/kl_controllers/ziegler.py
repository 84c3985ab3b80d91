"""The adaptive controller of Ziegler et al. 2019."""

from __future__ import annotations

import math

from rlhf_kl.kl_controllers.base import KLController, clip, require_positive


class ZieglerKL(KLController):
    """beta *= 1 + clip(KL/target - 1, -clip_error, clip_error) * n / horizon, n = episodes of this update.

    Source: Ziegler et al. 2019 (1909.08593), section 2.2, with clip_error 0.2 and horizon 10000. On
    log(beta) it is a pure integrator: late and overshooting. The horizon must fit the run: 10000 lets a
    run of 6400 episodes move beta by 1.14x at most. `auto` is total_episodes / 20, at least one batch.
    One departure: a single update multiplies beta by at least 1/2 and at most 2, since the published
    rule makes beta negative once n exceeds horizon / clip_error.
    """

    state_names = ("coef",)

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        horizon: float | str = "auto",
        clip_error: float = 0.2,
        total_episodes: int | None = None,
        batch_size: int = 1,
        min_coef: float | None = None,
        max_coef: float | None = None,
    ) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.clip_error = require_positive("clip_error", clip_error)
        if horizon != "auto":
            self.horizon = require_positive("horizon", horizon)
        elif total_episodes is None:
            raise ValueError("horizon: auto needs total_episodes")
        else:
            self.horizon = max(float(batch_size), require_positive("total_episodes", total_episodes) / 20.0)

    def update(self, kl: float, episodes: int) -> None:
        error = clip(kl / self.target - 1.0, -self.clip_error, self.clip_error)
        self._set_coef(self.coef * self._factor(error, episodes))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        low, high = (self._factor(sign * min(self.clip_error, 1.0), episodes) for sign in (-1.0, 1.0))
        return -math.log(low), math.log(high)

    def _factor(self, error: float, episodes: int) -> float:
        return clip(1.0 + error * episodes / self.horizon, 0.5, 2.0)
