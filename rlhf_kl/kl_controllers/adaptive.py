"""The default: learn during the run how its KL answers to beta, and solve that for beta."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from rlhf_kl.kl_controllers.base import KLController, clip, require_fraction, require_positive

Vector = list[float]

PRIOR_SPREAD = (0.2, 0.08, 0.04, 0.25)  # of offset, return, gain and inertia at the start
DRIFT = (0.03, 0.01, 0.01, 0.01)  # how far each may wander per update: the true response is not linear
NOISE = 0.04  # of sqrt(KL/target) near 1, measured and modelled together
FURTHEST = 3.0  # sqrt(KL/target) beyond which the model is not asked: there it never held
HEARD_AT_ALL = 0.25  # an update cut to less than this says nothing about beta


class AdaptiveKL(KLController):
    """Model-based control of x = sqrt(KL/target), linear in the policy's distance where KL is not.

    With v_k = x_{k+1} - x_k and u_k = log(beta_k / beta_0), this run's response is fitted recursively as

        v_k = offset - back * x_k - gain * u_k + inertia * v_{k-1}

    by a Kalman filter on the four coefficients (Ljung 1999, "System Identification", section 11.6: least
    squares with a random walk of the parameters), from priors that a small PPO run has. Each update then
    predicts x_{k+1}, which beta_k has already decided, and solves for the beta that takes
    x_{k+2} a share `approach` of the way to 1; `down` and `up` limit |change of log beta| per update.

    What follows from that: no integral, so nothing to wind up; no cold start to hold through, since a
    KL on its way up is predicted, not taken for an error; the loop's gain follows a plant that saturates.
    An update that the ceiling cut to a fraction f counts as v/f: what it would have been.
    """

    state_names: ClassVar[tuple[str, ...] | None] = (
        "coef", "start_coef", "kept", "model", "spread", "last", "last_speed",
    )  # fmt: skip

    def __init__(
        self,
        *,
        coef: float = 0.1,
        target: float = 0.1,
        approach: float = 0.13,
        speed: float = 0.2,
        gain: float = 0.1,
        inertia: float = 0.2,
        down: float = 0.6,
        up: float = 1.2,
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
    ) -> None:
        """`speed`, `gain` and `inertia` are the priors of the fit; the model starts by trusting `coef`."""
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target = require_positive("target", target)
        self.approach = require_positive("approach", approach)
        self.down, self.up = require_positive("down", down), require_positive("up", up)
        require_fraction("approach", approach)
        speed = require_fraction("speed", require_positive("speed", speed))
        inertia = require_fraction("inertia", inertia)
        self.start_coef = self.coef
        self.kept = 1.0  # of the update that beta_k is making now
        self.model: Vector = [speed, speed, require_positive("gain", gain), inertia]
        self.spread = [[PRIOR_SPREAD[i] ** 2 * (i == j) for j in range(4)] for i in range(4)]
        self.last: dict[str, Any] | None = None  # x, u and kept of the previous update
        self.last_speed = 0.0

    def observe_backtrack(self, factor: float) -> None:
        self.kept = factor

    def update(self, kl: float, episodes: int) -> None:
        del episodes
        x, u = math.sqrt(max(kl, 0.0) / self.target), math.log(self.coef / self.start_coef)
        if self.last is not None:
            v = x - self.last["x"]
            if self.last["kept"] > HEARD_AT_ALL:
                self._fit(x, v)
            self.last_speed = v
        kept, self.kept = self.kept, 1.0
        self.last = {"x": x, "u": u, "kept": kept}

        offset, back, gain, inertia = self.model
        v_now = kept * (offset - back * x - gain * u + inertia * self.last_speed)
        x_next = clip(x + v_now, 0.0, FURTHEST)
        wanted = (offset - back * x_next + inertia * v_now - self.approach * (1.0 - x_next)) / gain
        self._move(clip(wanted - u, -self.down, self.up))

    def log_steps(self, episodes: int) -> tuple[float, float]:
        del episodes
        return self.down, self.up

    def _fit(self, x: float, v: float) -> None:
        """One Kalman step on the model, from the move `v` that ended at `x`."""
        assert self.last is not None
        then, kept = self.last["x"], self.last["kept"]
        seen = [1.0, -then, -self.last["u"], self.last_speed]
        for i in range(4):
            self.spread[i][i] += DRIFT[i] ** 2
        noise = NOISE**2 * (1.0 + x * x + then * then) / kept**2
        cross = [_dot(row, seen) for row in self.spread]
        share = [c / (_dot(seen, cross) + noise) for c in cross]
        surprise = clip(v / kept - _dot(seen, self.model), -1.0, 1.0)
        offset, back, gain, inertia = (m + s * surprise for m, s in zip(self.model, share, strict=True))
        # A beta that does nothing or works backwards is noise: solving for it would fly to a bound.
        self.model = [offset, clip(back, 0.02, 0.8), clip(gain, 0.03, 1.0), clip(inertia, 0.0, 0.8)]
        self.spread = [[self.spread[i][j] - share[i] * cross[j] for j in range(4)] for i in range(4)]


def _dot(left: Vector, right: Vector) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))
