from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from rlhf_kl.models.actor_critic import choose_way
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.rollout import decoding
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.gpt2_step import AGREES, gpt2_step
from rlhf_kl.rollout.sampling import Sampled, sample_responses
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

pytestmark = pytest.mark.usefixtures("uncompiled")  # this is about what models do themselves

Make = Callable[..., Any]
Prompts = Callable[..., PromptBatch]


def calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each call of the model's own forward reads, from here on."""
    seen: list[int] = []
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    return seen


def sample(model: Any, prompts: PromptBatch, decoded: DecodedStates | None = None) -> Sampled:
    noise = uniforms(len(prompts), 12, 0, "x")
    return sample_responses(
        model, prompts.ids, prompts.mask, noise, eos_ids=[2], pad_id=0, temperature=0.8, decoded=decoded
    )


def test_the_model_is_asked_about_the_prompts_only(
    new_model: Make, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = new_model(seed=3), prompts_of(*("ab", "abcdab", "d") * 8)
    choose_way(model)  # after which transformers listens to its layers
    assert gpt2_step(model) is not None
    seen = calls(model, monkeypatch)
    sample(model, prompts)
    assert seen == [prompts.ids.shape[1]]


def test_it_says_what_the_model_says(new_model: Make, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length, some of which leave the batch on the way."""
    model, prompts = new_model(seed=3), prompts_of(*("ab", "abcdab", "d") * 8)
    quick = DecodedStates()
    found = sample(model, prompts, quick)
    monkeypatch.setattr(decoding, "gpt2_step", lambda _model: None)
    plain = DecodedStates()
    expected = sample(model, prompts, plain)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert len(quick.rows[-1]) < len(quick.rows[0])
    for name in ("logits", "hidden"):
        one, other = torch.cat(getattr(quick, name)), torch.cat(getattr(plain, name))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_who_asks_first_makes_no_difference(new_model: Make, prompts_of: Prompts) -> None:
    """Within bfloat16 rounding of the model's own step, and asked for in bfloat16."""
    model, prompts = new_model(seed=3), prompts_of(*("ab", "abcdab", "d") * 8)
    quick, plain = DecodedStates(), DecodedStates()
    with torch.autocast("cpu", torch.bfloat16):
        assert gpt2_step(model) is not None
        sample(model, prompts, quick)
        setattr(model, AGREES, False)
        sample(model, prompts, plain)
    one, other = quick.logits[1], plain.logits[1]  # the first step behind the prompts
    assert one.dtype == other.dtype
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def test_scaling_of_attention_by_layer_is_kept(new_model: Make, prompts_of: Prompts) -> None:
    model = new_model()
    model.transformer.h[0].attn.scaling = 3.0
    assert gpt2_step(model) is not None


def test_a_model_whose_layers_do_something_else_decodes_itself(
    new_model: Make, prompts_of: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model()
    own = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: 2 * own(self, x))
    assert gpt2_step(model) is None
    assert getattr(model, AGREES) is False
    seen = calls(model, monkeypatch)
    sample(model, prompts_of("ab", "d"))
    assert len(seen) > 1


def test_a_model_that_is_listened_to_decodes_itself(new_model: Make) -> None:
    model = new_model()
    with model.transformer.ln_f.register_forward_hook(lambda *_: None):
        assert gpt2_step(model) is None
    assert gpt2_step(model) is not None


def test_an_adapter_decodes_itself(new_model: Make) -> None:
    adapted = add_adapter(new_model(), r=2, alpha=4.0, target_modules=None, ref="x", what="policy.lora", seed=1)
    assert gpt2_step(adapted) is None
    assert gpt2_step(adapted.get_base_model()) is None
