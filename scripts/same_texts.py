"""float16 beside float32 on the same texts: two trainings, of which the second reads what the first has sampled.

    python scripts/same_texts.py FOLDER [UPDATES] [DTYPE]    default: 20 float16; a quarter of an hour for each run

Chance that draws other texts plays no part, so what differs is rounding. Of each figure: how far it is apart, in
percent of the root of its mean square in float32: at most, on average, and its mean. Into FOLDER/same_texts.json.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.config.resolve import load_config
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.run.log import write_json
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.setup import build_setup
from rlhf_kl.training.start import Training, prepare_training

RUNS = {
    "gae": [],
    "rloo": ["ppo.advantage=rloo", "rollout.samples_per_prompt=4"],
}
KEYS = ("policy/loss", "value/loss", "kl/token", "kl/sequence", "kl/after_update", "policy/grad_norm", "kl/coef")


def training(dtype: str, changes: list[str], updates: int) -> Training:
    """One that is ready for its first update."""
    config = load_config("train", "ppo_adaptive.yaml", [f"run.dtype={dtype}", "run.device=cpu", *changes])
    config = config.model_copy(
        update={"ppo": config.ppo.model_copy(update={"total_episodes": updates * config.rollout.batch_size})}
    )
    resolved = resolve(config)
    return prepare_training(resolved.stored, build_setup(resolved, torch.device("cpu")))


def rows(dtype: str, changes: list[str], updates: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of both."""
    found: dict[str, list[dict[str, Any]]] = {"float32": [], dtype: []}
    trainers = {name: training(name, changes, updates).trainer for name in found}
    sample = trainers["float32"].rollouts.sample
    for step in range(1, updates + 1):
        responses, sampled = sample(step)
        drawn = {"float32": (responses, sampled), dtype: (responses, sampled._replace(states=None))}
        for name, trainer in trainers.items():
            trainer.rollouts.sample = lambda _, mine=drawn[name]: mine
            began = time.perf_counter()
            update = trainer.update(step)
            found[name].append(update_row(update, trainer.settings) | {"seconds": time.perf_counter() - began})
            assert not any(type(event).__name__ == "UpdateSkipped" for event in update.events), update.events
    return found


def apart(found: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """How far the figures of a key are apart, in percent."""
    pairs = [(a[key], b[key]) for a, b in zip(*found.values(), strict=True)]
    size = math.sqrt(sum(a * a for a, _ in pairs) / len(pairs))
    if not size or math.isnan(size):
        return {}
    gaps = [100 * abs(b - a) / size for a, b in pairs]
    means = [sum(values) / len(values) for values in zip(*pairs, strict=True)]
    return {"largest": max(gaps), "mean": sum(gaps) / len(gaps), "of_means": 100 * abs(means[1] - means[0]) / size}


def main() -> None:
    """Train, compare, write."""
    folder = Path(sys.argv[1])
    updates = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    dtype = sys.argv[3] if len(sys.argv) > 3 else "float16"
    figures = {}
    for name, changes in RUNS.items():
        found = rows(dtype, changes, updates)
        figures[name] = {key: gaps for key in KEYS if (gaps := apart(found, key))}
        figures[name]["overflows"] = sum(row.get("policy/overflows", 0) for row in found[dtype])
        figures[name]["seconds"] = {which: sum(row["seconds"] for row in of) for which, of in found.items()}
        print(name, figures[name], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "same_texts.json", figures)


if __name__ == "__main__":
    main()
