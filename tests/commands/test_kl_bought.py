"""The alert tells a run that learns from one whose KL is noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl

Train = Callable[..., Any]

NOISE = """
import random, zlib

def noise(prompts, responses):
    return [random.Random(zlib.crc32((p + r).encode())).gauss(0, 1) for p, r in zip(prompts, responses, strict=True)]
"""
SETTINGS = (
    "ppo={learning_rate: 0.01, total_episodes: 640}",
    "rollout={batch_size: 32, reference_samples: 512}",
    "checkpoint={every: 4, keep: 10}",
    "eval.every=100",
)


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    """The setting of a reward that is a random number for every text."""
    (tmp_path / "noise.py").write_text(NOISE)
    return f"reward={{kind: '{tmp_path}/noise.py:noise'}}"


def _updates(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "kl/token" in row]


def _found(folder: Path) -> list[int]:
    return [row["step"] for row in _updates(folder) if any(a.startswith("kl-not-bought: ") for a in row["alerts"])]


def test_a_run_that_learns_buys_its_kl(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", *SETTINGS)
    rows = _updates(tmp_path / "run")
    assert rows[0]["kl/bought"] is None  # the policy is the reference
    assert fmean(row["kl/bought"] for row in rows[-10:]) > 0.3
    assert _found(tmp_path / "run") == []


def test_random_numbers_as_reward_are_found_out_and_by_a_resumed_run_too(
    train: Train, tmp_path: Path, noisy: str
) -> None:
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    train(whole, *SETTINGS, noisy)
    assert fmean(row["kl/bought"] for row in _updates(whole)[-10:]) < 0.1
    [step] = _found(whole)
    assert 8 < step < 12
    shutil.copytree(whole, crashed)
    shutil.rmtree(crashed / "final")
    (crashed / "summary.json").unlink()
    for checkpoint in checkpoints(crashed / "checkpoints"):
        if checkpoint.step > 8:
            shutil.rmtree(checkpoint.path)
    train(crashed, *SETTINGS, noisy, resume=True)
    assert [row["alerts"] for row in _updates(crashed)] == [row["alerts"] for row in _updates(whole)]
