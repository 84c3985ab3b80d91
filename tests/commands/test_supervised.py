"""The runs of `sft` and `reward-model`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.checkpoint import checkpoints
from rlhf_kl.commands.reward_model import run_reward_model
from rlhf_kl.commands.session import train_command
from rlhf_kl.commands.sft import run_sft
from rlhf_kl.config.load import load_config
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.models.load import load_causal_lm, load_reward_model
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.tracking.jsonl import read_jsonl

Run = Callable[..., dict[str, Any]]
RUNS: dict[str, Any] = {"sft": run_sft, "reward-model": run_reward_model}
FILES = {"sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}


@pytest.fixture
def supervised(tiny_folder: Path, tiny_data: Any, tmp_path: Path) -> Run:
    """`supervised("sft", folder, "sft.epochs=2", resume=True)` on the tiny model and its files."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": x, "chosen": "a" * n, "rejected": "d" * n} for x in "abcd" for n in range(1, 9)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "sft": [f"data.texts='{tiny_data.texts}'", "sft.batch_size=8", "sft.microbatch_size=4"],
        "reward-model": [
            f"data.pairs='{pairs}'",
            "reward_model.batch_size=8",
            "reward_model.microbatch_size=4",
        ],
    }

    def run(kind: Any, folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
        settings = [
            f"policy.model='{tiny_folder}'",
            f"run.output_dir='{folder}'",
            "run.device=cpu",
            "tracking.tensorboard=false",
            "checkpoint={every: 3, keep: 10}",
            *own[kind],
            *overrides,
        ]
        config = load_config(kind, FILES[kind], settings)
        display = TrainingDisplay(quiet=True)
        return train_command(RUNS[kind], config, resume=resume, overwrite=False, display=display)

    return run


def test_fine_tuning_goes_on_from_its_model(supervised: Run, tmp_path: Path, tiny_folder: Path) -> None:
    summary = supervised("sft", tmp_path / "run", "sft.epochs=10")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["eval/perplexity"] < 0.7 * rows[0]["eval/perplexity"]
    assert summary["final"]["eval/perplexity"] == rows[-1]["eval/perplexity"]
    tuned, start = load_causal_lm(str(tmp_path / "run" / "final")), load_causal_lm(str(tiny_folder))
    assert not torch.equal(tuned.lm_head.weight, start.lm_head.weight)


def test_from_scratch_it_brings_its_own_tokenizer(supervised: Run, tmp_path: Path) -> None:
    shape = "policy={model: null, architecture: {hidden_size: 8, layers: 1, heads: 1, context: 40, vocab_size: 270}}"
    supervised("sft", tmp_path / "run", shape)
    model = load_causal_lm(str(tmp_path / "run" / "final"))
    assert model.config.n_embd == 8
    assert model.config.n_positions == 40
    assert (tmp_path / "run" / "final" / "tokenizer.json").is_file()


def test_a_reward_model_is_one_that_train_accepts(supervised: Run, tmp_path: Path) -> None:
    supervised("reward-model", tmp_path / "run", "reward_model.epochs=10")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["eval/accuracy"] == 1.0
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert load_reward_model(str(tmp_path / "run" / "final")).config.num_labels == 1


@pytest.mark.parametrize("kind", RUNS)
def test_a_crashed_run_goes_on_as_if_nothing_had_been(supervised: Run, tmp_path: Path, kind: str) -> None:
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    epochs = f"{kind.replace('-', '_')}.epochs=2"
    supervised(kind, whole, epochs, "eval.every=3")
    assert [c.step for c in checkpoints(whole / "checkpoints")] == [3, 6]
    shutil.copytree(whole, crashed)
    (crashed / "summary.json").unlink()
    shutil.rmtree(crashed / "final")
    shutil.rmtree(crashed / "checkpoints" / "step-000006")
    supervised(kind, crashed, epochs, "eval.every=3", resume=True)
    rows = [read_jsonl(folder / "metrics.jsonl") for folder in (whole, crashed)]
    for row in (*rows[0], *rows[1]):
        row.pop("time/step_s", None)
    assert [row["step"] for row in rows[0] if any(key.startswith("eval/") for key in row)] == [1, 4, 7, 9]
    assert rows[0] == rows[1]
    first, second = (load_file(folder / "final" / "model.safetensors") for folder in (whole, crashed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_too_few_rows_to_keep_some_apart(supervised: Run, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("abc\n" * 19)
    with pytest.raises(InputError, match="too few"):
        supervised("sft", tmp_path / "run", f"data.texts='{tmp_path}/few.txt'")
    supervised("sft", tmp_path / "run", f"data={{texts: '{tmp_path}/few.txt', eval_texts: '{tmp_path}/few.txt'}}")


def test_an_empty_text_is_an_error(supervised: Run, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "abc"}\n' * 30 + '{"text": " "}\n')
    with pytest.raises(InputError, match=r"data\.texts: 1 of 30 texts are empty"):
        supervised("sft", tmp_path / "run", f"data.texts='{tmp_path}/x.jsonl'")


def test_gradients_that_stay_infinite_end_the_run(supervised: Run, tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="3 steps in a row were skipped") as caught:
        supervised("sft", tmp_path / "run", "sft.learning_rate=1e12", "sft.epochs=4", "sft.warmup=0.0")
    assert caught.value.exit_code == 3
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [bool(row.get("alerts")) for row in rows][-3:] == [True] * 3
    assert "skipped" in json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"]
