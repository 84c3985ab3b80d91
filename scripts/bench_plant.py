"""Every law against simulated policies: `python scripts/bench_plant.py [LAW...]`. Minutes, no model.

Six plants x three speeds x three spreads of the scores x starting beta 0.1x to 10x the ideal x three seeds
of 5 % measurement noise: 135 runs of 60 updates per plant. Noise alone makes a tail error of 0.04.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_kl.kl_controllers import build_controller
from rlhf_kl.kl_controllers.base import KLController, clip
from rlhf_kl.kl_controllers.held import tail_error, time_in_band
from rlhf_kl.simulate import LEAST_COEF, Plant, example_scores, simulate_plant, tilt_law

TARGET, LENGTH, UPDATES, EPISODES = 0.1, 20.0, 60, 64
SPEEDS, SIGMAS, STARTS, SEEDS = (0.1, 0.2, 0.4), (0.5, 1.0, 2.0), (0.1, 0.3, 1.0, 3.0, 10.0), (0, 1, 2)
PLANTS: dict[str, tuple[str, dict[str, float]]] = {
    "gaussian": ("gaussian", {}),
    "saturating": ("saturating", {}),
    "climbing": ("gaussian", {"climb": 0.25}),
    "sticky": ("saturating", {"climb": 0.25, "sticky_kl": 2 * TARGET * LENGTH}),
    "inert": ("gaussian", {"climb": 0.25, "inertia": 0.6}),
    "inert sat.": ("saturating", {"inertia": 0.6}),
}


def gaussian_law(sigma: float) -> Callable[[float], float]:
    """beta -> KL per sequence = sigma^2 / (2 beta^2), the tilt of Gaussian scores; constant below the least beta."""
    return lambda coef: 0.5 * (sigma / max(coef, sigma * LEAST_COEF)) ** 2


@dataclass
class HardPlant(Plant):
    """sqrt(KL) rises by at most `climb` per update (a clipped policy update goes only so far).

    Beyond `sticky_kl` the way down slows in proportion: beta hardly brings back a policy that is far away. `inertia`
    is the share of the last step that carries over (Adam's momentum, a value model that lags).
    """

    climb: float = math.inf
    sticky_kl: float = math.inf
    inertia: float = 0.0
    last_step: float = 0.0

    def advance(self, coef: float) -> None:
        step = self.speed * (math.sqrt(self.law(coef)) - self.root_kl)
        if step < 0.0 and self.root_kl**2 > self.sticky_kl:
            step *= self.sticky_kl / self.root_kl**2
        step = self.inertia * self.last_step + (1.0 - self.inertia) * min(step, self.climb)
        self.last_step = max(step, -self.root_kl)
        self.root_kl += self.last_step


def ideal_coef(law: Callable[[float], float], kl: float) -> float:
    """The beta at which a falling `law` gives `kl` nats per sequence, by bisection in log(beta)."""
    low, high = -12.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if law(math.exp(middle)) > kl else (low, middle)
    return math.exp(high)


class VelocityPI(KLController):
    """log beta += clip(kp*(e - e_prev) + ki*e, -0.4, 1.2), e = clip(sqrt(KL/target) - 1, -1, 2)."""

    def __init__(self, *, kp: float, ki: float, target: float, coef: float, min_coef: float, max_coef: float) -> None:
        super().__init__(coef=coef, min_coef=min_coef, max_coef=max_coef)
        self.target, self.kp, self.ki, self.last = target, kp, ki, -1.0

    def update(self, kl: float, episodes: int) -> None:
        del episodes
        error = clip(math.sqrt(kl / self.target) - 1.0, -1.0, 2.0)
        self._move(clip(self.kp * (error - self.last) + self.ki * error, -0.4, 1.2))
        self.last = error


BOUNDS = {"min_coef": 1e-5, "max_coef": 1e3}
Law = tuple[str | Callable[..., Any], dict[str, Any]]
LAWS: dict[str, Law] = {
    "fixed": ("fixed", {}),
    "Ziegler, horizon 10000": ("ziegler", {"horizon": 10000}),
    "Ziegler, horizon 320": ("ziegler", {"horizon": 320}),
    "Ziegler, horizon auto": ("ziegler", {}),
    "threshold": ("threshold", {}),
    "exponential, gain 0.1": ("exponential", {}),
    "exponential, gain 2": ("exponential", {"gain": 2.0}),
    "dual": ("dual", {}),
    "pid": ("pid", {}),
    "velocity PI 2 / 0.3": (VelocityPI, {"kp": 2.0, "ki": 0.3}),
    "velocity PI 2 / 0.6": (VelocityPI, {"kp": 2.0, "ki": 0.6}),
    "velocity PI 4 / 0.6": (VelocityPI, {"kp": 4.0, "ki": 0.6}),
    "adaptive": ("adaptive", {}),
}


SCORES = example_scores()


class Quality(NamedTuple):
    tail: float  # mean over the runs of mean |KL/target - 1|, second half
    worst: float
    peak: float  # mean over the runs of max KL/target
    in_band: float  # share of updates from 15 on within +-25 %


def judge(law: Law, plant: str) -> Quality:
    """One law on one plant."""
    kind, options = law
    options = options if kind == "fixed" else options | BOUNDS
    shape, traits = PLANTS[plant]
    tails, peaks, bands = [], [], []
    for sigma in SIGMAS:
        equilibrium = gaussian_law(sigma) if shape == "gaussian" else tilt_law([sigma * score for score in SCORES])
        ideal = ideal_coef(equilibrium, TARGET * LENGTH)
        for speed in SPEEDS:
            for start in STARTS:
                for seed in SEEDS:
                    controller = build_controller(
                        kind, options, target=TARGET, coef=ideal * start,
                        total_episodes=UPDATES * EPISODES, batch_size=EPISODES,
                    )  # fmt: skip
                    model = HardPlant(equilibrium, speed=speed, length=LENGTH, seed=seed, **traits)
                    rows = simulate_plant(controller, model, UPDATES, EPISODES)
                    ratios = [row.kl / TARGET for row in rows]
                    tails.append(tail_error(ratios) or 0.0)
                    peaks.append(max(ratios))
                    bands.append(time_in_band(ratios) or 0.0)
    number = len(tails)
    return Quality(sum(tails) / number, max(tails), sum(peaks) / number, sum(bands) / number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("laws", nargs="*", metavar="LAW", help=f"default: all; there are {'; '.join(LAWS)}")
    names = parser.parse_args().laws or list(LAWS)
    print("tail error mean/worst, peak mean, share in +-25 % from update 15")
    print(f"{'':<24}" + "".join(f"{name:>25}" for name in PLANTS))
    for name in names:
        qualities = (judge(LAWS[name], plant) for plant in PLANTS)
        cells = (f"{q.tail:.3f}/{q.worst:.2f} {q.peak:5.2f} {q.in_band:4.0%}" for q in qualities)
        print(f"{name:<24}" + "".join(f"{cell:>25}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
