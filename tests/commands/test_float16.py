"""Runs in float16: what their checkpoints hold, and weights that it has no number for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl import gradients
from rlhf_kl.models.pretrained import save_model
from tests.commands.test_resume import assert_same_run
from tests.commands.test_supervised import supervised  # noqa: F401
from tests.made import Make
from tests.runs import Cli, Train, rows, unfinished, updates

FLOAT16 = "run.dtype=float16"


def test_a_run_that_overflows_at_first_tells_no_alert_and_goes_on_bit_for_bit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "SCALE", 2.0**60)  # a run that goes on without its scale would begin there again
    train(tmp_path / "run", FLOAT16)
    found = updates(tmp_path / "run")
    assert found[0]["policy/overflows"] == 2
    assert found[0]["policy/loss"] is None
    assert not any(alert.startswith("update-skipped") for row in found for alert in row["alerts"])
    assert found[-1]["policy/overflows"] == 0
    assert found[-1]["policy/loss"] is not None
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["tracked"][0]["trainer"]["scale"]["factor"] == found[3]["policy/loss_scale"] < 2.0**24
    unfinished(tmp_path / "run", tmp_path / "crashed", 4)
    train(tmp_path / "crashed", FLOAT16, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "crashed")


@pytest.mark.parametrize("model", ["policy", "reference"])
def test_weights_beyond_float16_are_named_at_the_start(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path, new_model: Make, letters: Any, model: str
) -> None:
    large = new_model(seed=1)
    with torch.no_grad():
        large.transformer.h[0].mlp.c_fc.weight[0, 0] = -1e5
    save_model(large, letters, tmp_path / "large")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "run", "--quiet"]
    words += ["--set", f"{model}.model='{tmp_path / 'large'}'", "--set", FLOAT16]
    outcome = rlhf_kl(*words)
    assert outcome.code == 2
    assert f"{model}.model: transformer.h.0.mlp.c_fc.weight" in outcome.err
    assert "run.dtype" in outcome.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_supervised_runs_in_float16_go_on_bit_for_bit(
    supervised: Train,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "SCALE", 2.0**20)
    words = ["sft.epochs=2", "sft.learning_rate=5e-3", FLOAT16]
    supervised("sft", tmp_path / "run", *words)
    found = rows(tmp_path / "run")
    assert found[0]["train/overflows"] == 1
    assert found[-2]["train/overflows"] == 0
    assert not any(row.get("alerts") for row in found)
    assert found[-1]["eval/perplexity"] < found[0]["eval/perplexity"]
    unfinished(tmp_path / "run", tmp_path / "crashed", 3)
    supervised("sft", tmp_path / "crashed", *words, resume=True)
    assert rows(tmp_path / "crashed") == found
