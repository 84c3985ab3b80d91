"""The peer of `scripts/bench_groups.py`: TRL with the work of `rlhf-kl train`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_kl.models.load import load_reward_model, load_tokenizer, save_model
from rlhf_kl.rewards.model import RewardModel

pytest.importorskip("trl", reason="no TRL here: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_trl", Path(__file__).parents[2] / "scripts" / "peer_trl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_scores_are_ours_whatever_the_lengths(peer: ModuleType, tiny_reward_folder: Path, tmp_path: Path) -> None:
    """Less 1 for a text that is cut off; the tokenizer on disk pads on the left."""
    model, tokenizer = load_reward_model(str(tiny_reward_folder)), load_tokenizer(str(tiny_reward_folder))
    tokenizer.bos_token = None  # TRL adds none
    save_model(model, tokenizer, tmp_path / "reward")
    ours = RewardModel(model, tokenizer)
    prompts, responses = ["abc", "a", "abab"], ["cab", "b", "abcabcabc"]
    scores = ours(prompts, responses).tolist()
    theirs = peer.Scorer(str(tmp_path / "reward"), 1, torch.float32)(prompts, responses, [[5, 1], [5, 6], [5, 1]])
    assert theirs == pytest.approx([scores[0], scores[1] - 1, scores[2]], abs=1e-5)


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_an_update_is_one_pass_in_four_minibatches(
    peer: ModuleType,
    method: str,
    tmp_path: Path,
    tiny_folder: Path,
    tiny_reward_folder: Path,
    tiny_data: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, scored = [], []
    score = peer.Scorer.__call__

    def count(self: Any, prompts: list[str], *rest: Any, **columns: Any) -> Any:
        scored.append(len(prompts))
        return score(self, prompts, *rest, **columns)

    monkeypatch.setattr(peer.Scorer, "__call__", count)
    monkeypatch.setattr(peer.Curve, "on_step_end", lambda *_, **__: steps.append(1))
    words = ["--method", method, "--policy", str(tiny_folder), "--reward", str(tiny_reward_folder)]
    words += ["--prompts", str(tiny_data.prompts), "--beta", "0.1", "--dtype", "bfloat16", "--group", "2"]
    words += ["--batch", "16", "--updates", "3", "--max-new-tokens", "4"]
    curve = peer.train(peer.make_parser().parse_args(words), str(tmp_path))
    assert (len(curve), scored, len(steps)) == (3, [16, 16, 16], 12)
    assert curve[0]["seconds"] < curve[1]["seconds"] < curve[2]["seconds"]
