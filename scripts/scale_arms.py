"""One run scaled to every target beside runs that were trained there: score, true score and perplexity at equal KL.

    python scripts/scale_arms.py FOLDER             the built-in world, five seeds: 25 runs, 30 evaluations
    python scripts/scale_arms.py FOLDER REAL        also two rewards with TinyStories-656K; REAL: as RLHF_KL_REAL

Each seed's run at 0.2 is scaled to all targets (`rlhf-kl scale`), the others are evaluated by `rlhf-kl eval`, both on
the same held-out prompts. Finished runs are used again. Into FOLDER/scale.json: for each target the means, and
scaled less trained with its standard error over seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from bench_control import from_files

from rlhf_kl.run.log import write_json

HERE = Path(__file__).resolve().parent
FIGURES = ("kl_token", "scores", "gold", "perplexity", "distinct_2")
SCALED = 0.2  # the target of the run that is scaled
PLANTS: dict[str, dict[str, Any]] = {
    "built-in": {"base": "ppo_adaptive.yaml", "seeds": [0, 1, 2, 3, 4], "targets": [0.05, 0.1, 0.2, 0.4, 0.8]},
    "glad": {"base": "tinystories.yaml", "seeds": [0, 1], "targets": [0.05, 0.1, 0.2, 0.4]},
    "easy": {"base": "tinystories.yaml", "seeds": [0, 1], "targets": [0.05, 0.1, 0.2, 0.4]},
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # two processes at once


def program(*words: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "rlhf_kl", *words, "--json", "--quiet"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT).stdout)


def runs_of(name: str, folder: Path, real: str | None) -> dict[tuple[float, int], Path]:
    """Train a plant's runs; their folders by target and seed."""
    plant = PLANTS[name]
    base = plant["base"] if name == "built-in" else str(HERE / plant["base"])
    variants = {f"target-{target:g}": {"kl": {"target": target}} for target in plant["targets"]}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"base": base, "seeds": plant["seeds"], "variants": variants}), encoding="utf-8")
    sets = from_files(Path(real)) if real and name != "built-in" else []
    sets += [f"reward.kind={HERE}/stress_rewards.py:{name}"] if sets else []
    options = [word for each in sets for word in ("--set", each)]
    program("compare", "--config", str(file), "--output-dir", str(folder / name), "--jobs", "2", *options)
    grid = [(target, seed) for target in plant["targets"] for seed in plant["seeds"]]
    return {(target, seed): folder / name / "runs" / f"target-{target:g}-s{seed}" for target, seed in grid}


def compared(name: str, folder: Path, real: str | None) -> dict[str, Any]:
    """Trained and scaled figures of a plant by target."""
    runs, targets = runs_of(name, folder, real), PLANTS[name]["targets"]
    words = ",".join(f"{target:g}" for target in targets)

    def scaled(seed: int) -> dict[str, Any]:
        run = str(runs[SCALED, seed])
        return dict(program("scale", run, "--targets", words, "--samples", "1024", "--plugins"))

    def trained(key: tuple[float, int]) -> dict[str, Any]:
        return dict(program("eval", "--run", str(runs[key]), "--samples", "1024", "--plugins"))

    with ThreadPoolExecutor(2) as pool:
        tables = dict(zip(PLANTS[name]["seeds"], pool.map(scaled, PLANTS[name]["seeds"]), strict=True))
        evaluations = dict(zip(runs, pool.map(trained, runs), strict=True))
    result: dict[str, Any] = {}
    for target in targets:
        rows = {seed: row for seed, table in tables.items() for row in table["rows"] if row["target"] == target}
        entry: dict[str, Any] = {"seeds": len(rows)}
        for key in FIGURES:
            pairs = [(row.get(key), evaluations[target, seed].get(key)) for seed, row in rows.items()]
            pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
            if not pairs:
                continue
            gaps = [a - b for a, b in pairs]
            error = stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else None
            entry[key] = {
                "scaled": fmean(a for a, _ in pairs),
                "trained": fmean(b for _, b in pairs),
                "difference": fmean(gaps),
                "error": error,
            }
        result[f"{target:g}"] = entry
    return result


def main() -> None:
    """Every plant that can be had."""
    folder, real = Path(sys.argv[1]).resolve(), [*sys.argv[2:], os.environ.get("RLHF_KL_REAL")][0]
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: compared(name, folder, real) for name in PLANTS if real or name == "built-in"}
    write_json(folder / "scale.json", {"seeds": PLANTS["built-in"]["seeds"]} | results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
