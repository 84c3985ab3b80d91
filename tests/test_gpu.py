"""Runs on a GPU: `make gpu-check`."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.models import decoding
from rlhf_kl.models.lm import LM, takes_ready_masks
from rlhf_kl.models.norms import fuse_norms
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_run_on_one_gpu(rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings | {"run": {"device": "cuda", "dtype": dtype}}))
    outcome = rlhf_kl("train", "--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "run", "--quiet")
    assert outcome.code == 0, outcome.err
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "kl/token" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(math.isfinite(row["policy/loss"]) for row in rows)
    assert rows[0]["kl/token"] == pytest.approx(0.0, abs=1e-4 if dtype == "float32" else 1e-2)
    assert rows[-1]["kl/token"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_steps_replayed_as_a_cuda_graph_draw_what_steps_started_from_python_draw(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval().to("cuda")
    model.ready_masks = takes_ready_masks(model)
    lm, sampling, noise = LM(model, dtype), Sampling(48, 1.0, [2, 3], 0), uniforms(64, 48, 0, "x")
    prompts = [list(range(4, 5 + i % 7)) for i in range(64)]
    capture, graphs = decoding.captured, []
    monkeypatch.setattr(decoding, "captured", lambda step: graphs.append(capture(step)) or graphs[-1])
    monkeypatch.setattr(decoding, "GROWTH", 16)
    result = lm.sample(prompts, noise, sampling)
    monkeypatch.setattr(decoding, "takes_fixed_shapes", lambda *_: False)
    expected = lm.sample(prompts, noise, sampling)
    assert len(graphs) > 2  # the cache grows twice
    assert 0 < int(expected.ended.sum()) < 64
    same = (result.ids == expected.ids).all(1).double().mean() if result.ids.shape == expected.ids.shape else 0.0
    assert same == 1.0 if dtype == torch.float32 else same > 0.7


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_norms_of_one_kernel_have_the_gradients_of_those_that_are_written_out(kind: str) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2))
    fused = fuse_norms(copy.deepcopy(model.to("cuda")))
    ids = torch.arange(3, 63, device="cuda").view(4, 15)
    for each in (model, fused):
        each(ids).logits.log_softmax(-1)[..., 5].sum().backward()
    for own, other in zip(model.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad, rtol=1e-3, atol=1e-5)
