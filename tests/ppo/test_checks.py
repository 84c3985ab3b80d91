from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import GuardStop
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import compute_dtype
from rlhf_kl.models.value import ActorCritic, freeze
from rlhf_kl.ppo.checks import check_start, checked_prompts
from rlhf_kl.ppo.rollout import measure, response_layout
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make


@pytest.fixture
def check(prompts_of: Make) -> Make:
    """The checks on a policy and a reference, of samples drawn from the policy."""

    def check(
        policy: Any,
        reference: Any,
        initial: bool = True,
        share: bool = False,
        lm: type[LM] = LM,
        texts: Sequence[str] = ("a", "abcdab", "dd", "cab"),
        dtype: str = "float32",
    ) -> list[str]:
        number = compute_dtype(dtype)
        prompts, own = checked_prompts(PromptStream(prompts_of(*texts), 4, 0)), lm(policy, number)
        other = lm(reference if share else freeze(reference), number)
        sampled = own.sample(prompts, uniforms(4, 6, 0, "x"), Sampling(6, 0.8, [2], 0))
        plain = ReferenceStates(other, share=False)
        stats, _ = measure(ActorCritic(own), plain, response_layout(prompts, sampled, own.device), 0.8)
        return check_start(own, other, sampled, stats, reference_is_initial_policy=initial, dtype=dtype)

    return check


def test_a_reference_that_trains_along_is_another_model_or_has_no_numbers(check: Make, new_model: Make) -> None:
    policy, other, broken = new_model(seed=1), new_model(seed=2), new_model(seed=1)
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(torch.nan)
    with pytest.raises(GuardStop, match="share"):
        check(policy, policy, share=True)
    with pytest.raises(GuardStop, match="exact KL"):
        check(policy, other)
    with pytest.raises(GuardStop, match="not finite"):
        check(policy, broken, initial=False)
    check(policy, other, initial=False)


def test_activations_beyond_float16_are_told_with_the_way_out(check: Make, new_model: Make) -> None:
    """Each weight has a number in float16; what they make of a text has none."""
    policy = new_model(seed=1)
    with torch.no_grad():
        policy.transformer.h[0].mlp.c_fc.bias.fill_(100.0)
        policy.transformer.h[0].mlp.c_proj.weight[:, 0] = 1000.0
    for dtype in ("float32", "bfloat16"):
        check(policy, copy.deepcopy(policy), dtype=dtype)
    with pytest.raises(GuardStop, match=r"float16 .*run\.dtype"):
        check(policy, copy.deepcopy(policy), dtype="float16")


class IgnoresPadding(LM):
    """A model that reads padding as text, as one without attention masks would."""

    def step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> Any:
        return super().step(ids, torch.ones_like(mask), positions, cache)


class IgnoresPositions(LM):
    """A model that counts positions from the padding on."""

    def step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> Any:
        end = mask.shape[1]
        return super().step(ids, mask, torch.arange(end - ids.shape[1], end).expand_as(ids), cache)


class IgnoresItsCache(LM):
    """A model that begins anew with every token."""

    ready_masks = False

    def step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> Any:
        hidden, new = super().step(ids, mask if cache is None else mask[:, -1:], positions, None)
        return hidden, new if cache is None else cache


@pytest.mark.parametrize(
    "texts",
    [("a", "abcdab", "dd", "cab"), ("abab",), ("",)],
    ids=["lengths differ", "one prompt", "the bos alone"],
)
@pytest.mark.parametrize("lm", [IgnoresPadding, IgnoresPositions, IgnoresItsCache])
def test_a_model_that_samples_otherwise_than_it_reads(
    check: Make, new_model: Make, lm: type[LM], texts: Sequence[str]
) -> None:
    policy = new_model()
    assert check(policy, copy.deepcopy(policy), texts=texts)
    with pytest.raises(GuardStop, match="padding"):
        check(policy, copy.deepcopy(policy), lm=lm, texts=texts)
