"""Does the score of the built-in world follow Gao's law (2022, 2210.10760), gain = d (alpha - beta d), d = sqrt(KL)?

    python scripts/evidence/law.py FOLDER     reads the runs of FOLDER/../sweep_target

A least-squares fit of the score and of the true score, over the runs with a target up to `MOST` and over all of them;
R² of each. Gao fitted such a law to best-of-n; for RL they have d (alpha - beta log d), which is fitted too. Into
FOLDER/law.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import finished

from rlhf_kl.run.log import write_json

MOST = 0.4  # target, nats per token
LAWS: dict[str, Callable[[float], float]] = {"best_of_n": lambda d: d * d, "rl": lambda d: d * math.log(d)}


def fit(points: Sequence[tuple[float, float]], bend: Callable[[float], float]) -> dict[str, float]:
    """alpha and beta of gain = alpha d - beta bend(d), the standard error of beta, and R² about the mean."""
    columns = np.array([[d, -bend(d)] for d, _ in points])
    gains = np.array([gain for _, gain in points])
    (alpha, beta), *_ = np.linalg.lstsq(columns, gains, rcond=None)
    rest = gains - columns @ np.array([alpha, beta])
    variance = np.linalg.inv(columns.T @ columns)[1, 1] * (rest @ rest) / (len(gains) - 2)
    r2 = 1.0 - float(rest @ rest) / float(((gains - gains.mean()) ** 2).sum())
    return {"alpha": float(alpha), "beta": float(beta), "beta_error": math.sqrt(variance), "r2": r2}


def main() -> None:
    """Fit, and write."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = finished(folder.parent / "sweep_target")
    runs = [run for variant, seeds in found.items() if variant.startswith("target-") for run in seeds.values()]
    result: dict[str, Any] = {"seeds": sorted({run.seed for run in runs})}
    for score, gain in (("score", "score_gain"), ("true score", "gold_gain")):
        for name, most in (("to 0.4", MOST), ("to 1.6", math.inf)):
            used = [run.figures for run in runs if run.config.kl.target_value <= most]
            points = [(math.sqrt(one["kl_sequence"]), one[gain]) for one in used]
            result[f"{score} {name}"] = {law: fit(points, bend) for law, bend in LAWS.items()} | {"runs": len(points)}
    write_json(folder / "law.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
