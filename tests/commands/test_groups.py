"""Whole runs whose advantages come from several responses to one prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.run.log import read_jsonl

Cli = Callable[..., Any]


@pytest.fixture
def train_groups(tmp_path: Path, tiny_settings: dict[str, Any], rlhf_kl: Cli) -> Callable[..., Any]:
    """train_groups("rloo", "a.key=value", ...): the outcome of a run in tmp_path/run, with four responses a prompt."""
    file = tmp_path / "groups.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))

    def train(advantage: str, *changes: str) -> Any:
        settings = [f"ppo.advantage={advantage}", "rollout.samples_per_prompt=4", *changes]
        words = [word for setting in settings for word in ("--set", setting)]
        return rlhf_kl("train", "--config", file, "--output-dir", tmp_path / "run", *words)

    return train


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "kl/token" in row]


@pytest.mark.parametrize(
    ("advantage", "placement"),
    [pytest.param("rloo", "rao_blackwell", marks=pytest.mark.quick), ("grpo", "reward"), ("rloo", "loss")],
)
def test_no_critic_is_built_and_neighbours_answer_one_prompt(
    train_groups: Callable[..., Any], tmp_path: Path, advantage: str, placement: str
) -> None:
    estimator = {"rao_blackwell": "exact", "reward": "k1", "loss": "k2"}[placement]
    outcome = train_groups(advantage, f"kl.placement={placement}", f"kl.estimator={estimator}")
    assert outcome.code == 0, outcome.err
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 6
    assert all(row["value/loss"] is None and row["value/explained_variance"] is None for row in rows)
    assert all(0 <= row["rollout/equal_groups"] <= 4 for row in rows)
    assert rows[-1]["kl/token"] > 0.0
    samples = [row for row in read_jsonl(tmp_path / "run" / "samples.jsonl") if row["chosen"] == "first"]
    assert len({(row["step"], row["prompt"]) for row in samples}) == len({row["step"] for row in samples})
    assert len({row["response"] for row in samples[:4]}) > 1
