"""What tests of runs read and prepare: rows without timings, runs that were cut short, options and files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl

Cli = Callable[..., Any]  # `rlhf_kl("train", ...)` -> exit code, stdout, stderr
Train = Callable[..., dict[str, Any]]  # `train(folder, "kl.target=0.2")` -> summary
Write = Callable[..., Path]  # `write_run("name", rows)` -> folder
Rows = Callable[..., list[dict[str, Any]]]  # `metrics_rows([0.0, 0.1, ...])`


class Killed(BaseException):
    """Stands for SIGKILL; real ones are in tests/processes/test_kills.py and scripts/crash_test.py."""


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Without what depends on the clock and the machine."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / name)
    ]


def unfinished(run: Path, place: Path, kept: int) -> Path:
    """A copy, `place`, that ends after checkpoint `kept`, with rows beyond it and nothing that comes at the end."""
    shutil.copytree(run, place)
    (place / "summary.json").unlink()
    shutil.rmtree(place / "final")
    for checkpoint in checkpoints(place / "checkpoints"):
        if checkpoint.step > kept:
            shutil.rmtree(checkpoint.path)
    return place


def updates(folder: Path) -> list[dict[str, Any]]:
    """The rows of updates, without those that hold an evaluation alone."""
    return [row for row in rows(folder) if "kl/token" in row]


def sets(*changes: str) -> list[str]:
    """`--set` before each of these changes."""
    return [word for change in changes for word in ("--set", change)]


def jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    """Writes these records, a line each; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
