from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl import ui
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.models.scratch import new_gpt2
from rlhf_kl.ops.head import Head
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.training import loop
from tests.runs import Train, rows, updates


def test_which_updates_are_evaluated_and_sampled(tiny_run: Path) -> None:
    """Evaluations: before the first update, before every second, and after the last."""
    found, samples = rows(tiny_run), rows(tiny_run, "samples.jsonl")
    assert [row["step"] for row in found if "eval/perplexity" in row] == [1, 3, 5, 7]
    assert found[0]["eval/kl_token"] == pytest.approx(0, abs=1e-5)
    assert {sample["step"] for sample in samples if sample["chosen"] == "held out"} == {1, 3, 5, 7}
    assert {sample["step"] for sample in samples if sample["chosen"] != "held out"} == {1, 2, 4, 6}


def test_the_first_row_is_shown_before_the_evaluation_of_the_start(
    train: Train, tmp_path: Path, letters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures the policy before its first update all the same. One that is not its reference is measured first."""
    events: list[str] = []

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **options: events.append(name) or call(*args, **options)

    monkeypatch.setattr(loop, "evaluate_policy", noted("evaluated", loop.evaluate_policy))
    monkeypatch.setattr(ui.RunTable, "show", noted("shown", ui.RunTable.show))
    other = new_gpt2(vocab_size=7, hidden_size=8, layers=1, heads=1, context=32, tokenizer=letters, seed=5)
    save_model(other, letters, tmp_path / "model")
    few = ("ppo.total_episodes=16", "ppo.learning_rate=0.1")
    for name, changes in {"same": few, "other": (*few, f"reference.model='{tmp_path / 'model'}'")}.items():
        train(tmp_path / name, *changes)
    assert events == ["shown", "evaluated", "evaluated", "evaluated", "shown", "evaluated"]
    start, end = rows(tmp_path / "same")
    assert start["eval/kl_token"] == 0.0 < 0.01 < end["eval/kl_token"]
    assert start["eval/perplexity"] == pytest.approx(rows(tmp_path / "other")[0]["eval/perplexity"], rel=1e-6)


def test_a_run_that_cannot_start_overwrites_nothing(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    """What is wrong is found late: at the first samples."""
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".rlhf-kl.lock"}
    with pytest.raises(InputError):
        train(run, "reward.letter=z", overwrite=True)
    for path, content in before.items():
        assert path.read_bytes() == content
    assert train(run, "ppo.total_episodes=16", overwrite=True)["steps"] == 1
    assert [c.step for c in checkpoints(run / "checkpoints")] == [1]
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert {sample["step"] for sample in rows(run, "samples.jsonl")} == {1, 2}  # the last: held out


REWARDS = """
def high(prompts, responses): return [100.0 + len(r) for r in responses]
def none(prompts, responses): return [None] * len(responses)
def column(prompts, responses, promt): return [0.0] * len(responses)
def theirs(prompts, completions): return [0.0] * len(completions)
"""
REFUSED = {
    r"finds no scale": ("reward.letter=z",),
    r"clipped at 5, all 64 .* set reward.normalize": ("reward={{kind: '{0}/own.py:high', normalize: false}}",),
    r"returned None for all reference samples": ("reward.kind='{0}/own.py:none'",),
    r"needs 'promt', neither an option .* nor a column .*; did you mean prompt\?": ("reward.kind='{0}/own.py:column'",),
    r"if it is written for TRL, set interface: trl": ("reward.kind='{0}/own.py:theirs'",),
    r"reference\.model: has another vocabulary": ("reference.model='{0}/other'",),
    r"reference\.model: reads 'The .* as other tokens": ("reference.model='{0}/shuffled'",),
}


def test_what_cannot_be_trained_is_refused_and_leaves_the_folder_free(
    train: Train, tmp_path: Path, tiny_folder: Path, letters: Any
) -> None:
    (tmp_path / "own.py").write_text(REWARDS)
    other = new_gpt2(vocab_size=9, hidden_size=8, layers=1, heads=1, context=32, tokenizer=letters, seed=0)
    save_model(other, letters, tmp_path / "other")
    file = shutil.copytree(tiny_folder, tmp_path / "shuffled") / "tokenizer.json"  # as many tokens, other ids
    described = json.loads(file.read_text())
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(described))
    for words, changes in REFUSED.items():
        with pytest.raises(InputError, match=words):
            train(tmp_path / "run", *(change.format(tmp_path) for change in changes))
    # Equal scores are no error where no scale is needed; all rounds of reference samples are drawn before that.
    equal = ("reward.letter=z", "reward.normalize=false", "reward.missing_eos_penalty=0", "kl.controller.coef=auto")
    summary = train(tmp_path / "run", *equal, "ppo.total_episodes=16")
    assert (summary["reference"]["samples"], summary["steps"], summary["starting_coef"]) == (4 * 64, 1, 0.1)


def test_a_separate_value_function_starts_from_the_reward_model_and_is_saved_beside_the_policy(
    train: Train, tmp_path: Path, tiny_reward_folder: Path
) -> None:
    """It says the normalised score of a text that ends, before any training."""
    changes = ("reward.kind=model", f"reward.model='{tiny_reward_folder}'", "ppo.value_warmup=5")
    summary = train(tmp_path / "run", "policy.value=separate", *changes, "ppo.total_episodes=16")
    assert summary["final"]["value/explained_variance"] != 0.0
    names = load_file(tmp_path / "run" / "final" / "value.safetensors")
    assert any(name.startswith("value.trunk.") for name in names)
    assert "value.head.weight" in names


def test_a_policy_that_disagrees_with_its_rollout_is_found_behind_a_critics_warm_up(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LM.head

    def drifting(self: LM) -> Head:
        head = own(self)
        return head._replace(logits=lambda hidden: head.logits(hidden) * (1.05 if torch.is_grad_enabled() else 1.0))

    monkeypatch.setattr(LM, "head", drifting)
    with pytest.raises(GuardStop, match=r"step 2: .* log-prob .* 0\."):
        train(tmp_path / "run", "ppo.value_warmup=2")


def test_a_bfloat16_run_is_read_in_float32_where_there_is_no_gpu_and_that_is_told(
    train: Train, tmp_path: Path, rlhf_kl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(tmp_path / "run", "run.dtype=bfloat16", "run.device=auto", "ppo.total_episodes=16")
    for file in (tmp_path / "run" / "final").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
    assert rows(tmp_path / "run")[0]["kl/token"] == pytest.approx(0.0, abs=1e-3)
    line = "run.dtype: bfloat16; here, on cpu, the models compute in float32"
    (tmp_path / "texts.txt").write_text("abab")
    for words in ("generate --run run --prompt ab", "eval --run run", "eval --model run/final --texts texts.txt"):
        outcome = rlhf_kl(*words.split())
        assert outcome.code == 0, outcome.err
        assert outcome.err.count(line) == ("--run" in words), outcome.err


@pytest.mark.parametrize("value", ["features", "separate"])
def test_a_policy_can_draw_ids_that_the_reward_model_lacks(
    train: Train, tiny_folder: Path, tiny_reward_folder: Path, tmp_path: Path, value: str
) -> None:
    """Vocabularies are often padded: the reward model is read through its texts, and the critic through the policy."""
    model = load_causal_lm(str(tiny_folder))
    model.resize_token_embeddings(64, mean_resizing=False)
    save_model(model, load_tokenizer(str(tiny_folder)), tmp_path / "padded")
    policy = (f"policy.model='{tmp_path}/padded'", f"policy.value={value}")
    reward = f"reward={{kind: model, model: '{tiny_reward_folder}'}}"
    assert train(tmp_path / "run", *policy, reward, "ppo.total_episodes=32")["steps"] == 2


@pytest.mark.parametrize(
    ("advantage", "placement", "estimator"),
    [
        pytest.param("rloo", "rao_blackwell", "exact", marks=pytest.mark.quick),
        ("grpo", "reward", "k1"),
        ("rloo", "loss", "k2"),
    ],
)
def test_no_critic_is_built_and_neighbours_answer_one_prompt(
    train: Train, tmp_path: Path, advantage: str, placement: str, estimator: str
) -> None:
    penalty = (f"kl.placement={placement}", f"kl.estimator={estimator}")
    train(tmp_path / "run", f"ppo.advantage={advantage}", "rollout.samples_per_prompt=4", *penalty)
    found = updates(tmp_path / "run")
    assert all(row["value/loss"] is None and row["value/explained_variance"] is None for row in found)
    assert all(0 <= row["rollout/equal_groups"] <= 4 for row in found)
    assert found[-1]["kl/token"] > 0.0
    samples = [row for row in rows(tmp_path / "run", "samples.jsonl") if row["chosen"] == "first"]
    assert len({(row["step"], row["prompt"]) for row in samples}) == len({row["step"] for row in samples})
    assert len({row["response"] for row in samples[:4]}) > 1
