"""TRL's advantages and reward functions beside those of `rlhf-kl train`, and the peer of `scripts/bench_groups.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl.builtin.world import world_file
from rlhf_kl.models.pretrained import load_reward_model, load_tokenizer
from rlhf_kl.ops.advantages import grpo, rloo
from rlhf_kl.plugins import load_attribute
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.plugin import TRLReward
from rlhf_kl.types import Prompts, Responses

pytest.importorskip("trl", reason="no TRL here: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

FILE = """
def checker(prompts, completions, completion_ids, wanted, **kwargs):
    assert len(kwargs["number"]) == len(prompts)
    return [
        None if len(text) == 3 else text.count(letter) + 0.1 * len(ids) + number
        for text, ids, letter, number in zip(completions, completion_ids, wanted, kwargs["number"])
    ]
"""


def a_rollout(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and the output of TRL's scoring of one batch."""
    seen: dict[str, Any] = {}
    inner = trainer._calculate_rewards

    def calculate(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        rewards = inner(inputs, prompts, completions, ids)
        seen.update(inputs=inputs, prompts=prompts, completions=completions, ids=ids, rewards=rewards)
        return rewards

    trainer._calculate_rewards = calculate
    trainer.model.train()
    output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return seen, output


@pytest.mark.parametrize(("kind", "ours"), [("rloo", rloo), ("grpo", grpo)])
def test_the_advantages_are_those_of_trl_without_a_kl(
    make_trainer: Callable[..., Any], kind: str, ours: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """At beta 0; RLOOTrainer takes its KL off the score before the baseline, of the whole response at once."""
    trainer = make_trainer(kind, 0.0)
    seen, output = a_rollout(trainer)
    scores, mask = seen["rewards"].squeeze(1), output["completion_mask"].bool()
    assert scores.view(-1, 8).std(1).min() > 0.0
    found, _ = ours(scores, torch.zeros(mask.shape), mask, torch.ones_like(scores, dtype=torch.bool), 8)
    theirs = torch.where(mask, output["advantages"].unsqueeze(1), 0.0)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


def test_a_function_file_gives_the_scores_that_it_gives_in_trl(toy: Any, toy_model: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    function = load_attribute(f"{tmp_path}/mine.py:checker")
    rows = [
        {"prompt": a + b, "wanted": a, "number": i} for i, (a, b) in enumerate(zip("abcdefgh", "hgfedcba", strict=True))
    ]
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=64, max_completion_length=4, report_to=[], use_cpu=True,
        bf16=False, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(model=toy_model, reward_funcs=function, args=args, train_dataset=Dataset.from_list(rows))
    seen, _ = a_rollout(trainer)
    inputs = seen["inputs"]
    prompts = Prompts([row["prompt"] for row in inputs], [[]] * len(inputs), inputs, [()] * len(inputs))
    scores = TRLReward(function)(Responses(prompts, seen["completions"], seen["ids"]))
    theirs = seen["rewards"].squeeze(1)
    assert 0 < int(theirs.isnan().sum()) < len(theirs)
    assert torch.allclose(scores.float(), theirs, rtol=0, atol=0, equal_nan=True)  # TRL keeps float32


def test_its_scores_are_ours_whatever_the_lengths(peer: Any) -> None:
    """Less 1 for a text that is cut off."""
    folder = world_file("builtin:reviews-small", "reward")
    tokenizer = load_tokenizer(folder)
    prompts, responses = ["This film", "I", "We saw"], [" was good.", "t", " it in a cinema and it was dull"]
    scores = RewardModel(load_reward_model(folder), tokenizer).score(prompts, responses).tolist()
    end = tokenizer.eos_token_id
    theirs = peer.Scorer(folder, end, torch.float32, "cpu")(prompts, responses, [[5, end], [5, 6], [5, end]])
    assert theirs == pytest.approx([scores[0], scores[1] - 1, scores[2]], abs=1e-5)


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_an_update_is_one_pass_in_four_minibatches(
    peer: Any, method: str, tmp_path: Path, tiny_folder: Any, tiny_reward_folder: Path, tiny_data: Any, monkeypatch: Any
) -> None:
    steps, scored = [], []
    score = peer.Scorer.__call__

    def count(self: Any, prompts: list[str], *rest: Any, **columns: Any) -> Any:
        scored.append(len(prompts))
        return score(self, prompts, *rest, **columns)

    monkeypatch.setattr(peer.Scorer, "__call__", count)
    monkeypatch.setattr(peer.Curve, "on_step_end", lambda *_, **__: steps.append(1))
    args = SimpleNamespace(
        method=method, policy=str(tiny_folder), reward=str(tiny_reward_folder), prompts=tiny_data.prompts, beta=0.1,
        dtype="bfloat16", device="cpu", seed=0, updates=3, batch=16, group=2, minibatches=4, epochs=1,
        max_new_tokens=4, learning_rate=2e-4,
    )  # fmt: skip
    curve = peer.train(args, str(tmp_path))
    assert (len(curve), scored, len(steps)) == (3, [16, 16, 16], 12)
    assert curve[0]["seconds"] < curve[1]["seconds"] < curve[2]["seconds"]
