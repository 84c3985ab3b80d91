"""The attention of bfloat16 runs on a CPU, beside transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, OPTConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_kl.models import attention
from rlhf_kl.models.attention import MOST_SCORES
from rlhf_kl.models.lm import LM

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48),
    "window": MistralConfig(**SIZES, num_key_value_heads=1, intermediate_size=48, sliding_window=5),
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}


def inputs(batch: int, heads: int, groups: int, new: int, length: int) -> list[torch.Tensor]:
    """Query, key and value in bfloat16, with gradients."""
    torch.manual_seed(0)
    shapes = [(batch, heads, new, 16), (batch, groups, length, 16), (batch, groups, length, 16)]
    return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]


def exact(parts: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Attention in float64, from its formula."""
    query, key, value = (x.double() for x in parts)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["causal", "one token", "mask of a row", "mask of a head"])
def test_it_and_its_gradients_are_those_of_the_formula(heads: int, groups: int, kind: str) -> None:
    new, length = (1, 9) if kind == "one token" else (7, 7)
    parts = inputs(2, heads, groups, new, length)
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    given = None
    if kind.startswith("mask"):
        mask = given = mask.expand(2, heads if kind.endswith("head") else 1, new, length).clone()
        given[1, :, 1:, 0] = False
    found, _ = attention.attention(torch.nn.Module(), *parts, given)
    right = exact(parts, mask)
    torch.testing.assert_close(found.double(), right, atol=0.03, rtol=0.03)
    direction = torch.randn(right.shape)
    ours, theirs = (torch.autograd.grad((x.float() * direction).sum(), parts) for x in (found, right))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.06, rtol=0.06)


def test_a_row_of_padding_that_attends_to_nothing_is_finite() -> None:
    mask = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    found, _ = attention.attention(torch.nn.Module(), *inputs(2, 4, 4, 3, 3), mask)
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["float32", "long", "position bias"])
def test_the_rest_is_left_to_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def theirs(*given: Any, **options: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*given, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", theirs)
    length = int(MOST_SCORES**0.5) + 1 if kind == "long" else 5
    parts = inputs(1, 2, 2, length, length)
    if kind == "float32":
        parts = [x.float() for x in parts]
    options = {"position_bias": torch.zeros(1, 2, length, length).bfloat16()} if kind == "position bias" else {}
    attention.attention(torch.nn.Module(), *parts, None, **options)
    assert calls


@pytest.mark.parametrize("family", CONFIGS)
def test_models_use_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).eval()
    ids = torch.arange(24).view(2, 12) % 40
    calls: list[int] = []
    own = attention.attention

    def ours(*given: Any, **options: Any) -> Any:
        calls.append(1)
        return own(*given, **options)

    with torch.no_grad():
        right = model(ids, attention_mask=torch.ones_like(ids)).logits
        monkeypatch.setattr(attention, "attention", ours)
        LM(model, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert len(calls) == 2
    torch.testing.assert_close(found.float(), right, atol=0.02, rtol=0.02)
