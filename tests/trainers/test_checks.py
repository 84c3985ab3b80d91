from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rlhf_kl.models.actor_critic import ActorCritic, freeze
from torch import nn

from rlhf_kl.errors import GuardStop
from rlhf_kl.models.text import encode, pad
from rlhf_kl.rollout.collect import Sampling, draw, measure
from rlhf_kl.seeding import uniforms
from rlhf_kl.trainers.checks import check_start
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]


@pytest.fixture
def check(letters: Any) -> Callable[..., list[str]]:
    """The checks on a policy and a reference, of samples drawn from the policy."""

    def check(policy: Any, reference: Any, same_start: bool = True, share: bool = False) -> list[str]:
        texts = ["a", "abcdab", "dd", "cab"]
        ids, mask = pad([encode(letters, text) for text in texts], 0, left=True)
        prompts, model = PromptBatch(texts, ids, mask), ActorCritic(policy)
        reference = reference if share else freeze(reference)
        sampled = draw(policy, prompts, uniforms(4, 6, 0, "x"), Sampling(6, 0.8, [2], 0), "cpu")
        measured = measure(model, reference, prompts, sampled, 0.8)
        return check_start(
            model, reference, prompts, sampled, measured, temperature=0.8, same_start=same_start, float32=True
        )

    return check


def test_a_sound_start_says_what_was_checked(check: Make, new_model: Make) -> None:
    policy = new_model()
    found = check(policy, copy.deepcopy(policy))
    assert len(found) == 2
    assert any("KL" in line for line in found)
    assert any("padded" in line for line in found)


def test_a_reference_that_trains_along(check: Make, new_model: Make) -> None:
    policy = new_model()
    with pytest.raises(GuardStop, match="share"):
        check(policy, policy, share=True)


def test_a_reference_that_is_not_the_start(check: Make, new_model: Make) -> None:
    with pytest.raises(GuardStop, match="exact KL"):
        check(new_model(seed=1), new_model(seed=2))
    check(new_model(seed=1), new_model(seed=2), same_start=False)


def test_weights_that_are_not_numbers(check: Make, new_model: Make) -> None:
    policy = new_model()
    broken = copy.deepcopy(policy)
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(torch.nan)
    with pytest.raises(GuardStop, match="not finite"):
        check(policy, broken, same_start=False)


class IgnoresPadding(nn.Module):
    """A model that reads padding as text, as one without attention masks would."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, **arguments: Any) -> Any:
        arguments["attention_mask"] = torch.ones_like(arguments["attention_mask"])
        return self.inner(**arguments)


class IgnoresPositions(IgnoresPadding):
    """A model that counts positions from the padding on."""

    def forward(self, **arguments: Any) -> Any:
        arguments.pop("position_ids", None)
        return self.inner(**arguments)


@pytest.mark.parametrize("kind", [IgnoresPadding, IgnoresPositions])
def test_a_model_that_padding_confuses(check: Make, new_model: Make, kind: type[nn.Module]) -> None:
    policy = new_model()
    with pytest.raises(GuardStop, match="padding"):
        check(kind(policy), kind(copy.deepcopy(policy)))
