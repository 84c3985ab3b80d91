"""Rollouts by vLLM itself, on the built-in model (`make test-vllm`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.builtin.world import world_file
from rlhf_kl.models.engine import VLLM
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.pretrained import load_causal_lm
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import move
from tests.runs import rows, sets

pytest.importorskip("vllm", reason="no vLLM here: make test-vllm")
pytestmark = pytest.mark.filterwarnings("default")

SMALL = {"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True}
PROMPTS = [[5, 9, 14], [7], [11, 12, 13, 40, 41]]


@pytest.mark.parametrize("adapter", [False, True])
def test_log_probs_are_those_of_the_policy_as_it_is_now(adapter: bool) -> None:
    model = load_causal_lm(world_file("builtin:reviews-small", "policy"))
    if adapter:
        model = add_adapter(model, r=2, alpha=4.0, target_modules=None, ref="base", seed=1)
    policy, sampling, noise = LM(model), Sampling(12, 0.8, [1], 0), uniforms(3, 12, 0, "x")
    engine = VLLM(policy, 32, SMALL)
    for seed in (2, 3):
        move(model, seed=seed, by=0.02)
        drawn, again = (engine.sample(PROMPTS, noise, sampling) for _ in range(2))
        assert torch.equal(drawn.ids, again.ids)
        for i, row in enumerate(drawn.rows()):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*PROMPTS[i], *row]])).logits[0, -len(row) - 1 : -1]
            logp = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor([row]).T)[:, 0]
            torch.testing.assert_close(drawn.logprobs[i, : len(row)], logp, rtol=1e-3, atol=1e-3)
            assert bool(drawn.ended[i]) == (row[-1] == 1)


def test_a_run_is_drawn_from_its_policy(tmp_path: Path) -> None:
    """Its tokens are as likely as the policy says; log-probs of both differ in the last digits."""
    changes = ("rollout.engine=vllm", f"rollout.engine_options={json.dumps(SMALL)}")
    command = [sys.executable, "-m", "rlhf_kl", "train", "--config", "smoke.yaml", "--quiet", "--output-dir", tmp_path]
    subprocess.run([*command, *sets(*changes)], check=True)
    updates: list[dict[str, Any]] = [row for row in rows(tmp_path) if "kl/token" in row]
    assert updates
    for row in updates:
        assert 0.0 < row["rollout/engine_gap"] < 1e-4
        assert row["rollout/engine_cut"] == 0.0
        assert abs(row["policy/logprob_gap"]) < 4 * row["policy/logprob_gap_stderr"]
