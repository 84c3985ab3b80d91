from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM, enable_recompute, recomputing
from rlhf_kl.ops.packing import pack_last
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling


def test_what_is_inside_a_layer_that_is_computed_again_keeps_its_mode() -> None:
    """In training mode the router of these experts multiplies what it reads by noise."""
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        router_jitter_noise=0.5,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[1, 3, 4, 5, 6]])
    plain = model(input_ids=ids, use_cache=False).logits
    enable_recompute(model, "policy.gradient_checkpointing")
    with recomputing(model):
        again = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(again, plain)
    assert not any(module.training for module in model.modules())


def test_sampling_keeps_its_cache(new_model: Any, prompts_of: Any) -> None:
    """Layers that are computed again have none: only passes with gradients are such."""
    prompts, noise = prompts_of("ab", "c"), uniforms(2, 6, 0, "x")
    drawn, read = [], []
    for recompute in (False, True):
        lm = LM(new_model())
        if recompute:
            enable_recompute(lm.model, "policy.gradient_checkpointing")
        lm.hidden(pack_last([[1, 3]], lm.device)).sum().backward()
        lm.model.transformer.register_forward_pre_hook(
            lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        drawn.append(lm.sample(prompts, noise, Sampling(6, 1.0, [], 0)))
    assert torch.equal(drawn[0].ids, drawn[1].ids)
    assert read == [3, 1, 1, 1, 1, 1] * 2


def test_an_architecture_that_cannot_is_refused(new_model: Any) -> None:
    model = new_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(InputError, match=r"policy\.gradient_checkpointing: "):
        enable_recompute(model, "policy.gradient_checkpointing")
