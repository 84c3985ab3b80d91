"""The runs of `sft` and `reward-model`."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.commands.sft import run_supervised
from rlhf_kl.commands.train import train_command
from rlhf_kl.config.resolve import load_config
from rlhf_kl.errors import GuardStop
from rlhf_kl.models.pretrained import load_causal_lm, load_reward_model, load_tokenizer
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.run.checkpoint import checkpoints
from tests.runs import Train, jsonl, rows, unfinished

FILES = {"sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}


@pytest.fixture
def supervised(tiny_folder: Path, tiny_data: Any, tmp_path: Path) -> Train:
    """`supervised("sft", folder, "sft.epochs=2", resume=True)` on the tiny model and its files."""
    rows = [
        {"prompt": x + "abcd"[n % 4] * n, "chosen": "a" * n, "rejected": "d" * n} for x in "abcd" for n in range(1, 9)
    ]
    pairs = jsonl(tmp_path / "pairs.jsonl", rows)
    own = {"sft": f"data.texts='{tiny_data.texts}'", "reward-model": f"data.pairs='{pairs}'"}

    def run(kind: Any, folder: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
        settings = [
            f"policy.model='{tiny_folder}'",
            f"run.output_dir='{folder}'",
            "run.device=cpu",
            "tracking.tensorboard=false",
            "checkpoint={every: 3, keep: 10}",
            own[kind],
            *(f"{kind.replace('-', '_')}.{size}" for size in ("batch_size=8", "microbatch_size=4")),
            *overrides,
        ]
        config = load_config(kind, FILES[kind], settings)
        return train_command(run_supervised, config, resume=resume, overwrite=False)

    return run


RESPONSES = ["data.prompt_column=prompt", "data.response_column=chosen", "eval.max_documents=null", "sft.epochs=8"]


@pytest.mark.parametrize(
    ("file", "changes", "share"),
    [pytest.param(None, ["sft.epochs=10"], 0.7, marks=pytest.mark.quick), ("pairs.jsonl", RESPONSES, 0.8)],
    ids=["texts", "responses"],
)
def test_fine_tuning_goes_on_from_its_model_and_makes_held_out_texts_likelier(
    supervised: Train, tmp_path: Path, tiny_folder: Path, file: str | None, changes: list[str], share: float
) -> None:
    place = [f"data.texts='{tmp_path / file}'"] if file else []
    summary = supervised("sft", tmp_path / "run", *place, *changes)
    found = rows(tmp_path / "run")
    assert found[-1]["eval/perplexity"] < share * found[0]["eval/perplexity"]
    assert summary["final"]["eval/perplexity"] == found[-1]["eval/perplexity"]
    assert summary["final"]["eval/loss"] == pytest.approx(math.log(found[-1]["eval/perplexity"]))
    tuned, start = load_causal_lm(str(tmp_path / "run" / "final")), load_causal_lm(str(tiny_folder))
    assert not torch.equal(tuned.lm_head.weight, start.lm_head.weight)


@pytest.mark.quick
def test_a_reward_model_is_one_that_train_accepts(supervised: Train, tmp_path: Path) -> None:
    supervised("reward-model", tmp_path / "run", "reward_model.epochs=10")
    found = rows(tmp_path / "run")
    assert found[-1]["eval/accuracy"] == 1.0
    assert found[-1]["eval/loss"] < found[0]["eval/loss"]
    assert load_reward_model(str(tmp_path / "run" / "final")).config.num_labels == 1


@pytest.mark.parametrize("kind", FILES)
def test_a_crashed_run_goes_on_as_if_nothing_had_been(supervised: Train, tmp_path: Path, kind: str) -> None:
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    epochs = f"{kind.replace('-', '_')}.epochs=2"
    supervised(kind, whole, epochs, "eval.every=3")
    assert [c.step for c in checkpoints(whole / "checkpoints")] == [3, 6, 8]
    unfinished(whole, crashed, 3)
    supervised(kind, crashed, epochs, "eval.every=3", resume=True)
    found = rows(whole)
    assert [row["step"] for row in found if any(key.startswith("eval/") for key in row)] == [1, 4, 7, 9]
    assert rows(crashed) == found
    first, second = (load_file(folder / "final" / "model.safetensors") for folder in (whole, crashed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradients_that_stay_infinite_end_the_run(supervised: Train, tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="3 steps in a row") as caught:
        supervised("sft", tmp_path / "run", "sft.learning_rate=1e12", "sft.epochs=4", "sft.warmup=0.0")
    assert caught.value.exit_code == 3
    found = rows(tmp_path / "run")
    assert [bool(row.get("alerts")) for row in found][-3:] == [True] * 3
    assert "skipped" in json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"]


def test_labelled_texts_make_a_classifier(supervised: Train, tmp_path: Path) -> None:
    texts = ["".join(word) for word in itertools.product("abcd", repeat=3)]
    labels = jsonl(tmp_path / "l.jsonl", [{"sentence": text, "y": int("a" in text)} for text in texts])
    data = f"data={{labels: '{labels}', text_column: sentence, label_column: y, pairs: null}}"
    summary = supervised("reward-model", tmp_path / "run", data, "reward_model.epochs=30")
    assert summary["final"]["eval/accuracy"] == 1.0
    histogram = summary["heldout"]["histogram"]
    assert len(histogram["edges"]) == 21
    assert sum(histogram["label 1"]) + sum(histogram["label 0"]) == 4  # of 64
    final = str(tmp_path / "run" / "final")
    scorer = RewardModel(load_reward_model(final), load_tokenizer(final))
    with_it, without = scorer.score(["", ""], ["cab", "cdb"]).tolist()
    assert with_it > 0 > without  # the log-odds of label 1
