"""Runs a controller on a given KL sequence or on a simulated policy (a plant): no model, no torch, in seconds."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_kl.control.guard import Guard
from rlhf_kl.control.tilt import tilted
from rlhf_kl.control.verdict import BAND, in_band, tail_error, verdict
from rlhf_kl.events import worded

# The least beta of a law, over the scores' spread. Below it, and at 0, the law has the KL of this beta.
LEAST_COEF = math.exp(-7.0)


class SimulatedUpdate(NamedTuple):
    step: int
    kl: float  # measured, the controller gets it
    coef: float  # used in this update
    coef_next: float


def tilt_law(scores: Sequence[float]) -> Callable[[float], float]:
    """beta -> KL per sequence of the tilt of these scores, tabulated; linear in both logarithms between the points.

    Below the least beta the KL is constant, above the largest it falls with beta^2 (the limit of every tilt).
    """
    spread = math.sqrt(math.fsum((s - math.fsum(scores) / len(scores)) ** 2 for s in scores) / len(scores))
    betas = [spread * LEAST_COEF * math.exp(0.1 * i) for i in range(121)]
    points = [(math.log(beta), math.log(tilted(scores, beta).kl)) for beta in betas]

    def law(coef: float) -> float:
        at = math.log(coef) if coef > 0.0 else points[0][0]
        if at >= points[-1][0]:
            return math.exp(points[-1][1] - 2.0 * (at - points[-1][0]))
        right = max(1, bisect.bisect_right(points, (at, math.inf)))
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return math.exp(y0 + (y1 - y0) * max(0.0, at - x0) / (x1 - x0))

    return law


def example_scores() -> list[float]:
    """Scores like those of a reward model: two kinds of responses, and an upper limit that many can reach."""
    rng = random.Random(0)
    raw = [rng.gauss(0.9, 0.6) if rng.random() < 0.4 else rng.gauss(-0.6, 0.8) for _ in range(1024)]
    return [min(score, 1.6) for score in raw]


@dataclass
class Plant:
    """A simulated policy under training: sqrt(KL) goes a share `speed` of the way to that of `law(beta)` per update.

    All in nats per sequence; `measure` divides by `length` for a per-token KL and adds relative noise.
    """

    law: Callable[[float], float]
    speed: float = 0.2
    noise: float = 0.05
    length: float = 1.0
    seed: int = 0
    root_kl: float = 0.0
    _rng: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def measure(self) -> float:
        return self.root_kl**2 / self.length * max(0.0, 1.0 + self.noise * self._rng.gauss(0.0, 1.0))

    def advance(self, coef: float) -> None:
        """One policy update at `coef`."""
        self.root_kl += self.speed * (math.sqrt(self.law(coef)) - self.root_kl)


def simulate_sequence(
    controller: Guard, kls: Sequence[float], episodes: int, alerts: list[str]
) -> list[SimulatedUpdate]:
    """Update the controller with `kls` (nats, the target's unit), one per update of `episodes` responses.

    `alerts` gets the controller's, each with its step in front. A KL that is not finite moves nothing.
    """
    rows = []
    for step, kl in enumerate(kls, start=1):
        coef = controller.beta
        alerts += [f"step {step}: {alert}" for alert in worded(controller.step(kl, episodes))]
        rows.append(SimulatedUpdate(step, kl, coef, controller.beta))
    return rows


def simulate_plant(controller: Guard, plant: Plant, updates: int = 60, episodes: int = 64) -> list[SimulatedUpdate]:
    """Close the loop in the trainer's order: measure, update the policy at coef, then update coef."""
    rows = []
    for step in range(1, updates + 1):
        kl, before, coef = plant.measure(), plant.root_kl, controller.beta
        plant.advance(coef)
        # Measured at the same states: both values have the same noise factor as `kl`.
        after = (kl / before**2 if before else 1.0 / plant.length) * plant.root_kl**2
        controller.step(kl, episodes, (kl, after, after))
        rows.append(SimulatedUpdate(step, kl, coef, controller.beta))
    return rows


def conclusion(rows: Sequence[SimulatedUpdate], target: float) -> list[str]:
    """How many updates were in range, whether and when the KL settled there, and where beta went."""
    values = [row.kl / target if math.isfinite(row.kl) else math.inf for row in rows]
    word, since, error = verdict(values)
    if since is not None:
        settled = f"settled: in range from update {since} on, off by {error:.0%} on average since"
    elif word == "short":
        settled = "too short to say whether it settles"
    else:
        settled = f"not settled: off by {tail_error(values):.0%} on average in the second half"
    coefs = [rows[0].coef, *(row.coef_next for row in rows)]
    return [
        f"within {BAND:.0%} of the target in {sum(map(in_band, values))} of {len(rows)} updates",
        settled,
        f"beta {coefs[0]:.3g} -> {coefs[-1]:.3g}, between {min(coefs):.3g} and {max(coefs):.3g}",
    ]
