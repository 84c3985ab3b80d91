"""A reward model's adapter: trained, loaded by `train` and by plain peft, merged."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.errors import InputError
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.training.load import Loader
from tests.runs import Cli, Train, jsonl, rows, sets

TEXTS = ["abc", "dd", "a", "bcdabcd"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A classifier of words with an `a`, as an adapter."""
    folder = tmp_path_factory.mktemp("reward-lora")
    texts = ["".join(word) for word in itertools.product("abcd", repeat=3)]
    labels = jsonl(folder / "l.jsonl", [{"text": text, "label": int("a" in text)} for text in texts])
    settings = {
        "run": {"device": "cpu"},
        "policy": {"model": str(tiny_folder), "lora": {"r": 4}},
        "data": {"labels": labels},
        "reward_model": {"epochs": 12, "batch_size": 8, "microbatch_size": 4, "learning_rate": 2e-2},
        "checkpoint": {"every": 20, "keep": 10},
        "tracking": {"tensorboard": False},
    }
    (folder / "reward.yaml").write_text(yaml.safe_dump(settings))
    return folder / "reward.yaml"


@pytest.fixture(scope="module")
def run(config: Path, rlhf_kl: Cli) -> Path:
    """A finished run with its merged model; not to be written to."""
    folder = config.parent / "run"
    outcome = rlhf_kl("reward-model", "--config", config, "--output-dir", folder, "--quiet", "--merge")
    assert outcome.code == 0, outcome.err
    return folder


def scores(folder: Path) -> torch.Tensor:
    reward = Loader().reward_model(str(folder), "reward.model", ScorerSection())
    return reward.score([""] * len(TEXTS), TEXTS)


def test_it_learns_and_stores_the_adapter_and_the_head_alone(run: Path) -> None:
    assert rows(run)[-1]["eval/loss"] < 0.5 * rows(run)[0]["eval/loss"]
    assert not (run / "final" / "model.safetensors").exists()
    names = list(load_file(run / "final" / "adapter_model.safetensors"))
    assert all("lora" in name or "score" in name for name in names)
    assert any("score" in name for name in names)
    kept = load_file(next((run / "checkpoints").iterdir()) / "model-00001.safetensors")
    assert all("lora" in name or "score" in name for name in kept)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_plain_peft_and_transformers_score_the_same(run: Path, tiny_folder: Path, letters: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    found = scores(run / "final")
    assert float(found.std()) > 0.1
    base = AutoModelForSequenceClassification.from_pretrained(str(tiny_folder), num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run / "final")).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(str(run / "merged"), dtype=torch.float32).eval()
    for text, score in zip(TEXTS, found.tolist(), strict=True):
        ids = torch.tensor([[1, *letters(text, add_special_tokens=False)["input_ids"], 2]])
        with torch.no_grad():
            for model in (adapted, merged):
                assert float(model(input_ids=ids).logits) == pytest.approx(score, abs=1e-4)


def test_train_takes_it_as_its_reward_model(run: Path, train: Train) -> None:
    # A separate value function starts from the reward model.
    train(run.parent / "ppo", f"reward={{kind: model, model: '{run}/final'}}", "policy.value=separate")
    samples = rows(run.parent / "ppo", "samples.jsonl")[:8]
    again = Loader().reward_model(str(run / "final"), "reward", ScorerSection())
    expected = again.score([row["prompt"] for row in samples], [row["response"] for row in samples])
    assert [row["score"] for row in samples] == pytest.approx(expected.tolist(), abs=1e-4)
    assert rows(run.parent / "ppo")[-2]["kl/token"] > 1e-4


def test_an_adapter_on_an_adapter_is_found_down_to_the_base(
    run: Path, config: Path, tiny_folder: Path, rlhf_kl: Cli, tmp_path: Path
) -> None:
    folder = str(tiny_folder)
    model = add_adapter(load_causal_lm(folder), r=2, alpha=4.0, target_modules=None, ref=folder, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    save_model(model, load_tokenizer(folder), tmp_path / "adapter")
    start = sets(f"policy.model='{tmp_path}/adapter'", "reward_model.epochs=1")
    options = ("--config", config, "--output-dir", tmp_path / "run", "--quiet", "--merge")
    outcome = rlhf_kl("reward-model", *options, *start)
    assert outcome.code == 0, outcome.err
    assert torch.allclose(scores(tmp_path / "run" / "final"), scores(tmp_path / "run" / "merged"), atol=1e-4)
    with pytest.raises(InputError, match=r"task_type CAUSAL_LM.*would be random"):
        scores(tmp_path / "adapter")
