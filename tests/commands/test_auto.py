"""What `auto` leaves to the model and the machine: chosen once, shown, stored, and the same after --resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.commands.session import on_this_machine
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.run.log import read_jsonl

Train = Callable[..., dict[str, Any]]
AUTO = ("ppo.learning_rate=auto", "run.dtype=auto")


def first_rate(folder: Path) -> float:
    rate: float = read_jsonl(folder / "metrics.jsonl")[0]["policy/learning_rate"]
    return rate


def test_a_run_stores_what_was_chosen_and_goes_on_with_nothing_else(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = train(run, *AUTO)
    # A model of some thousand parameters gets the highest rate.
    assert summary["learning_rate"] == first_rate(run) == 5e-4
    stored = load_config("train", run / "config.yaml")
    assert (stored.run.dtype, stored.ppo.learning_rate) == ("float32", "auto")
    (run / "summary.json").unlink()
    state = json.loads((run / "checkpoints/step-000006/state.json").read_text())
    assert state["tracked"][0]["trainer"]["rate"]["peak"] == 5e-4
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("dtype: float32", "dtype: bfloat16"))  # as begun on a GPU
    with pytest.raises(InputError, match=r"run\.dtype: bfloat16 -> float32"):
        train(run, *AUTO, resume=True)


@pytest.mark.parametrize(
    ("device", "gpu", "computes_in_it", "dtype"),
    [
        ("auto", True, True, "bfloat16"),
        ("auto", True, False, "float32"),
        ("cpu", True, True, "float32"),
        ("auto", False, False, "float32"),
    ],
)
def test_the_type_of_a_machine(
    device: str, gpu: bool, computes_in_it: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or computes_in_it
    )
    config = TrainConfig.model_validate({"run": {"dtype": "auto", "device": device}})
    assert on_this_machine(config).run.dtype == dtype
    written = TrainConfig.model_validate({"run": {"dtype": "float32", "device": device}})
    assert on_this_machine(written) is written
