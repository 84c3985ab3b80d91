"""What the scripts of the evidence share: finished runs by variant and seed, commands, means with errors."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_kl.report.one_run import RunResult, read_run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a folder of this name, or the hub
Runs = dict[str, dict[int, RunResult]]  # by variant and seed


def run_program(*words: str) -> str:
    """Run a command of the program, in the checkout; what it prints."""
    command = [sys.executable, "-m", "rlhf_kl", *words, "--quiet"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout


def program(*words: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(run_program(*words, "--json"))


def scorers() -> dict[str, Any]:
    """The functions of scorers.py, by name."""
    return runpy.run_path(str(HERE / "scorers.py"))


def finished(folder: Path) -> Runs:
    """The finished runs of a comparison's folder, in the order of their variants' names."""
    runs: Runs = {}
    for path in sorted((folder / "runs").glob("*-s*")):
        name, _, seed = path.name.rpartition("-s")
        if (path / "summary.json").is_file():
            runs.setdefault(name, {})[int(seed)] = read_run(path)
    return runs


def trained(config: str, folder: Path) -> Runs:
    """Train the runs of a comparison that are not finished, two at once; RLHF_KL_REAL has what the hub would."""
    sets: dict[str, str] = {}
    if config.startswith("stories_") and os.environ.get("RLHF_KL_REAL"):
        stories = real("data/tinystories-1000/stories.jsonl", "")
        sets = {"policy.model": real("models/TinyStories-656K", ""), "data.prompts": stories, "eval.texts": stories}
        sets["eval.split"] = "test"  # a file has no other
    options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    run_program("compare", "--config", str(HERE / config), "--jobs", "2", "--output-dir", str(folder), *options)
    return finished(folder)


def with_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and its standard error; None for the error of a single value."""
    return {"mean": fmean(values), "error": stdev(values) / sqrt(len(values)) if len(values) > 1 else None}


def once(file: Path, make: Any) -> Any:
    """What a file holds; made and written where it is not there yet."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        found = json.dumps(make(), indent=1)
        file.write_text(found, encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def real(path: str, hub: str) -> str:
    """A file below RLHF_KL_REAL where that is set, else an id of the hub."""
    folder = os.environ.get("RLHF_KL_REAL")
    return str((Path(folder) / path).absolute()) if folder else hub
