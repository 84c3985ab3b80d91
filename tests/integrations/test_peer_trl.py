"""The peer of `scripts/bench_groups.py`: TRL with the work of `rlhf-kl train`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_kl.build.world import World
from rlhf_kl.models.load import load_reward_model, load_tokenizer
from rlhf_kl.rewards.model import RewardModel

pytest.importorskip("trl", reason="no TRL here: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")


def test_its_scores_are_ours_whatever_the_lengths(peer: Any, small_world: World) -> None:
    """Less 1 for a text that is cut off."""
    folder = str(small_world.reward_model())
    tokenizer = load_tokenizer(folder)
    prompts, responses = ["This film", "I", "We saw"], [" was good.", "t", " it in a cinema and it was dull"]
    scores = RewardModel(load_reward_model(folder), tokenizer).score(prompts, responses).tolist()
    end = tokenizer.eos_token_id
    theirs = peer.Scorer(folder, end, torch.float32)(prompts, responses, [[5, end], [5, 6], [5, end]])
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
        dtype="bfloat16", seed=0, updates=3, batch=16, group=2, minibatches=4, epochs=1,
        max_new_tokens=4, learning_rate=2e-4,
    )  # fmt: skip
    curve = peer.train(args, str(tmp_path))
    assert (len(curve), scored, len(steps)) == (3, [16, 16, 16], 12)
    assert curve[0]["seconds"] < curve[1]["seconds"] < curve[2]["seconds"]
