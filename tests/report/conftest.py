from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.report.comparison import Comparison, read_comparison
from tests.runs import Rows, Write

LENGTH = 60
TWO = {
    "adaptive-0.1x": ("adaptive", 0.02, 0.1),
    "adaptive-1x": ("adaptive", 0.2, 0.1),
    "static-0.1x": ("fixed", 0.02, 0.4),
    "static-1x": ("fixed", 0.2, 0.1),
    "static-10x": ("fixed", 2.0, 0.01),
}


@pytest.fixture
def grid(write_run: Write, metrics_rows: Rows) -> Callable[..., Comparison]:
    """`grid({"static-1x": ("fixed", 0.2, 0.1)}, seeds=5)`: runs that climb to a KL and stay there (default: `TWO`).

    kind, beta, and the KL per token at the end; each seed ends one percent higher than the one before. The score
    gained, and gold, are `gain` of sqrt(KL per response) (default: those of `metrics_rows`), the score plus `extra`
    by variant. ceiling: by variant. reference: of the summary, by variant and seed.
    """

    def make(
        variants: dict[str, tuple[str, float, float]] = TWO,
        seeds: int = 5,
        extra: dict[str, float] | None = None,
        updates: dict[int, int] | None = None,
        gain: Callable[[float], float] | None = None,
        ceiling: dict[str, dict[str, Any] | None] | None = None,
        reference: Callable[[str, int], dict[str, Any]] = lambda name, seed: {},
    ) -> Comparison:
        paths = []
        for name, (kind, coef, kl) in variants.items():
            for seed in range(seeds):
                length = (updates or {}).get(seed, LENGTH)
                last = kl * (1 + 0.01 * seed)
                rows = metrics_rows([last * min(1, step / 10) for step in range(length)], coef=coef)
                if gain is not None:
                    rows[-1]["eval/gold"] = gain(math.sqrt(rows[length - 1]["kl/sequence"]))
                for row in rows[:length]:
                    if gain is not None:
                        row["objective/scores_shaped"] = gain(math.sqrt(row["kl/sequence"]))
                    if gain is not None and "eval/gold" in row:
                        row["eval/gold"] = row["objective/scores_shaped"]
                    # Noise of the seed, the same for all variants: pairs take it away.
                    row["objective/scores_shaped"] += 0.3 * math.sin(seed) + (extra or {}).get(name, 0.0)
                config = {
                    "run": {"seed": seed},
                    "kl": {"controller": {"kind": kind, "coef": coef}, "ceiling": (ceiling or {}).get(name)},
                    "ppo": {"total_episodes": 64 * LENGTH},
                }
                noise = {"scores_shaped": 0.3 * math.sin(seed), "scores_spread": 1.0}
                noise |= reference(name, seed)
                paths.append(write_run(f"{name}-s{seed}", rows, config=config, summary={"reference": noise}))
        return read_comparison(paths)

    return make
