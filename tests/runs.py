"""What tests of runs read and prepare: rows without timings, and runs that were cut short."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl


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
