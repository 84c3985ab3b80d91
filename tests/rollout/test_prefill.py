from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.models import prefix_sharing
from rlhf_kl.models.actor_critic import choose_way
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.sampling import Sampled, sample_responses
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

pytestmark = pytest.mark.usefixtures("uncompiled")  # this is about what models do themselves

Make = Callable[..., Any]
SYSTEM = "abba" * 2


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=7, intermediate_size=24, max_position_embeddings=32, initializer_range=0.5, **sizes)
    return LlamaForCausalLM(config).eval()


def tokens_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens in each call of the model's own forward from here on, the prompts' in the largest."""
    seen: list[int] = []
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].numel())
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    return seen


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_responses_are_those_to_prompts_read_one_by_one(
    new_model: Make, prompts_of: Callable[..., PromptBatch], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = new_model(seed=3) if kind == "gpt2" else llama()
    choose_way(model)
    prompts = prompts_of(*(SYSTEM + end for end in ("ab", "c", "abc", "d", "c")))
    found: list[tuple[Sampled, DecodedStates, int]] = []
    seen = tokens_read(model, monkeypatch)
    for share in (math.inf, 0.0):
        monkeypatch.setitem(prefix_sharing.LAYING_OUT, "cpu", share)
        seen.clear()
        decoded = DecodedStates()
        noise = uniforms(len(prompts), 10, 0, "x")
        sampled = sample_responses(
            model, prompts.ids, prompts.mask, noise, eos_ids=[2], pad_id=0, temperature=0.8, decoded=decoded
        )
        found.append((sampled, decoded, max(seen)))
    (whole, plain, padded), (once, quick, distinct) = found
    assert padded == prompts.ids.numel()
    assert distinct == 1 + len(SYSTEM) + len(["a", "ab", "abc", "c", "d"])  # bos and what all share once
    for a, b in zip(whole, once, strict=True):
        assert torch.equal(a, b)
    for name in ("logits", "hidden"):
        one, other = torch.cat(getattr(quick, name)), torch.cat(getattr(plain, name))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_system_message_is_read_once_at_the_width_of_a_real_model(
    new_model: Make, prompts_of: Callable[..., PromptBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(seed=3, spread=0.1, hidden_size=64)  # pays from 39 % on
    choose_way(model)
    seen = tokens_read(model, monkeypatch)
    noise = uniforms(4, 2, 0, "x")
    for prompts, expected in ((prompts_of("ab", "c", "d", "b"), 4 * 3), (prompts_of("ab", "ab", "ab", "a"), 3)):
        seen.clear()
        sample_responses(model, prompts.ids, prompts.mask, noise, eos_ids=[2], pad_id=0, temperature=1.0)
        assert max(seen) == expected
