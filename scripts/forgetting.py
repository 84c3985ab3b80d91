"""Forgetting beside the KL: `rlhf-kl eval` of every run of compare_advantages.yaml, and straight lines through them.

    python scripts/forgetting.py FOLDER [RUNS]    RUNS: default FOLDER/../advantages/runs, as `make figures` leaves it

Forgetting is the rise of the held-out loss over the reference's, in nats per token. Into FOLDER/forgetting.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import correlation, fmean, linear_regression
from typing import Any

from rlhf_kl.run.log import write_json


def evaluate(run: Path, folder: Path) -> dict[str, Any]:
    """What `eval` finds, once."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        command = [sys.executable, "-m", "rlhf_kl", "eval", "--run", str(run), "--json", "--quiet"]
        file.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout, encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    forgetting = found["nats_per_token"] - found["reference"]["nats_per_token"]
    return {"kl": found["kl_token"], "forward_kl": found["forward_kl_token"], "forgetting": forgetting}


def within(runs: dict[str, dict[str, Any]], name: str) -> list[float]:
    """A figure of each run, less its mean over the runs with the same target."""
    same = defaultdict(list)
    for run, found in runs.items():
        same[run.split("-")[1]].append(found[name])
    return [found[name] - fmean(same[run.split("-")[1]]) for run, found in runs.items()]


def main() -> None:
    """Evaluate, and fit."""
    folder = Path(sys.argv[1])
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else folder.parent / "advantages" / "runs"
    runs = {run.name: evaluate(run, folder) for run in sorted(source.iterdir()) if run.is_dir()}
    lost = [found["forgetting"] for found in runs.values()]
    result: dict[str, Any] = {"runs": len(runs), "seeds": sorted({int(run.rpartition("-s")[2]) for run in runs})}
    for name in ("forward_kl", "kl"):
        every = [found[name] for found in runs.values()]
        result[name] = {
            "slope": linear_regression(every, lost).slope,
            "r2": correlation(every, lost) ** 2,
            "r2_within_a_target": correlation(within(runs, name), within(runs, "forgetting")) ** 2,
        }
    means = defaultdict(list)
    for run, found in runs.items():
        means[run.rpartition("-s")[0]].append(found)
    result |= {run: {name: fmean(one[name] for one in found) for name in found[0]} for run, found in means.items()}
    write_json(folder / "forgetting.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
