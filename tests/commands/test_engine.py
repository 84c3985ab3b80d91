"""Rollouts by an engine, vLLM's stand-in; vLLM itself in tests/integrations."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.commands.findings import run_doctor
from rlhf_kl.config.resolve import load_config
from rlhf_kl.errors import InputError, ServiceFailed
from rlhf_kl.models.engine import VLLM, require_engine
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests import vllm_standin
from tests.made import Make, move
from tests.runs import Train, rows
from tests.vllm_standin import PlainLLM

SAMPLING = Sampling(8, 3.0, [2], 0)  # hot, as the moved policy is sure of its tokens


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in vllm_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("adapter", [False, True])
def test_an_engine_samples_from_the_policy_as_it_is_now(new_model: Make, prompts_of: Make, adapter: bool) -> None:
    """With its log-probs; and the same noise draws the same responses."""
    model = new_model()
    policy = LM(add_adapter(model, r=2, alpha=4.0, target_modules=None, ref="base", seed=1) if adapter else model)
    engine, asked, noise = VLLM(policy, 20, {}), prompts_of("ab", "c", "dddd").ids, uniforms(3, 8, 0, "x")
    with pytest.raises(InputError, match=r"^rollout\.engine: vllm, .*'non"):
        VLLM(policy, 20, {"nonsense": 1})
    engine.load(policy)
    before = engine.sample(asked, noise, SAMPLING)
    assert engine.sample(asked, noise, Sampling(8, 3.0, [-1], 0)).mask.all()  # no token ends
    move(policy.model, seed=2)
    assert torch.equal(engine.sample(asked, noise, SAMPLING).logprobs, before.logprobs)
    engine.load(policy)
    after, again = (engine.sample(asked, noise, SAMPLING) for _ in range(2))
    assert torch.equal(after.ids, again.ids)
    assert not torch.equal(after.logprobs, before.logprobs)
    assert not torch.equal(engine.sample(asked, uniforms(3, 8, 1, "x"), SAMPLING).ids, after.ids)
    for i, row in enumerate(after.rows()):
        whole = torch.tensor([[*asked[i], *row]])
        logp = (policy.model(input_ids=whole).logits[0, -len(row) - 1 : -1] / 3.0).log_softmax(-1)
        torch.testing.assert_close(
            after.logprobs[i, : len(row)], logp.gather(1, torch.tensor([row]).T)[:, 0].detach(), rtol=1e-4, atol=1e-4
        )
        assert bool(after.ended[i]) == (row[-1] == 2)


def test_a_run_with_an_engine_goes_on_after_its_failure(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At update 4: with a checkpoint of update 3, beside those of every second one."""
    summary = train(tmp_path / "whole", "rollout.engine=vllm")
    updates = [row for row in rows(tmp_path / "whole") if "kl/token" in row]
    assert summary["steps"] == len(updates) == 6
    assert max(row["rollout/engine_gap_max"] for row in updates) < 1e-4
    assert {row["rollout/engine_cut"] for row in updates} == {0.0}
    generate, metrics, failed = PlainLLM.generate, tmp_path / "run" / "metrics.jsonl", list[int]()

    def failing(self: PlainLLM, *arguments: Any, **options: Any) -> Any:
        if not failed and metrics.is_file() and len(rows(tmp_path / "run")) == 3:
            failed.append(1)
            raise RuntimeError("no blocks are left\nand more lines")
        return generate(self, *arguments, **options)

    monkeypatch.setattr(PlainLLM, "generate", failing)
    with pytest.raises(ServiceFailed, match=r"^rollout\.engine: vllm: no .* step 3 "):
        train(tmp_path / "run", "rollout.engine=vllm")
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].step == 3
    train(tmp_path / "run", "rollout.engine=vllm", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:3]))
    failed.clear()
    last = run_doctor(load_config("train", tmp_path / "run" / "config.yaml", ["rollout.engine=vllm"]))[-1]
    assert last.level == "fatal"
    assert re.match("rollout.engine: .*no blocks", last.text)


def test_an_engine_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    require_engine("vllm")
    monkeypatch.setattr("rlhf_kl.models.engine.find_spec", lambda _: None)
    require_engine(None)
    with pytest.raises(InputError, match=r"^rollout\.engine: .*pip install 'rlhf-kl\[vllm\]'"):
        require_engine("vllm")
