"""RMS norms as one kernel: which layers compute one, and that it is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.models.norms import OneKernel, fuse_norms, weight_offset


class Own(nn.Module):
    """A norm of a user's."""

    def __init__(self, variance: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.added, self.variance, self.scaled = 1e-6, variance, scaled

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.variance else x
        return x * (x.square().mean(-1, keepdim=True) + self.added).rsqrt() * (self.weight if self.scaled else 1.0)


def model(kind: str) -> Any:
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 8} if kind != "gpt2" else {}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2)).eval()


@pytest.mark.parametrize(("kind", "offset", "count"), [("llama", 0, 5), ("qwen3", 0, 9), ("gemma3_text", 1, 13)])
def test_the_norms_of_a_model_are_found_and_compute_the_same(kind: str, offset: int, count: int) -> None:
    whole = model(kind)
    plain, names = copy.deepcopy(whole), list(whole.state_dict())
    fuse_norms(whole)
    fused = {name: layer for name, layer in copy.deepcopy(whole).named_modules() if isinstance(layer, OneKernel)}
    assert len(fused) == count
    for name, layer in fused.items():
        own = plain.get_submodule(name)
        assert isinstance(layer, type(own))
        assert layer.offset == offset
        nn.init.normal_(layer.weight, std=0.5, generator=torch.Generator().manual_seed(1))
        own.load_state_dict(layer.state_dict())
        x = torch.randn(7, len(layer.weight), generator=torch.Generator().manual_seed(2)) / 1000
        expected = own(x)
        assert torch.equal(layer(x), expected)  # on a CPU the layer's own way
        torch.testing.assert_close(rms_norm(x, layer.weight.shape, layer.weight + offset, layer.epsilon), expected)
    ids = torch.arange(3, 9).view(1, 6)
    assert torch.equal(whole(ids).logits, plain_logits(kind, ids))
    assert list(whole.state_dict()) == names


def plain_logits(kind: str, ids: Tensor) -> Tensor:
    logits: Tensor = model(kind)(ids).logits
    return logits


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(16), nn.LayerNorm(16, bias=False), Own(variance=True), Own(scaled=False), nn.Linear(16, 1)]
)
def test_a_layer_that_computes_something_else_stays(layer: nn.Module) -> None:
    assert weight_offset(layer) is None


def test_a_norm_is_known_by_what_it_computes() -> None:
    assert weight_offset(Own()) == 0
