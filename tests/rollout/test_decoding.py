from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.kernels.gpt2 import Decoder
from rlhf_kl.models.actor_critic import choose_way
from rlhf_kl.models.compiled import AGREES
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.sampling import sample_responses
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

pytestmark = pytest.mark.usefixtures("compiler")

Make = Callable[..., Any]


@pytest.mark.parametrize("shared", [False, True])
def test_it_samples_what_the_model_samples(
    new_model: Make, prompts_of: Callable[..., PromptBatch], monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Prompts of unequal length; where they begin alike, they are read by the model and continued by it."""
    model = new_model(seed=3, hidden_size=64, spread=0.1)
    choose_way(model)
    texts = [f"{'abcdabcdab' if shared else ''}{end}" for end in ("ab", "abcdab", "d", "c")]
    prompts = prompts_of(*texts)
    steps = []
    own = Decoder.__call__
    monkeypatch.setattr(Decoder, "__call__", lambda self, tokens: (steps.append(len(tokens)), own(self, tokens))[1])
    taken_over: list[int] = []
    take = Decoder.take
    monkeypatch.setattr(Decoder, "take", lambda self, *a: (taken_over.append(1), take(self, *a))[1])
    found = []
    for with_it in (True, False):
        setattr(model, AGREES, with_it)
        decoded = DecodedStates()
        noise = uniforms(len(prompts), 12, 0, "x")
        sampled = sample_responses(
            model, prompts.ids, prompts.mask, noise, eos_ids=[2], pad_id=0, temperature=0.8, decoded=decoded
        )
        found.append((sampled, decoded, len(steps)))
    (quick, said, taken), (plain, expected, after) = found
    assert taken == after > 1
    assert len(taken_over) == shared
    for a, b in zip(quick, plain, strict=True):
        assert torch.equal(a, b)
    for name in ("logits", "hidden"):
        one, other = torch.cat(getattr(said, name)), torch.cat(getattr(expected, name))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_nothing_that_is_not_kept_changes_what_is_sampled(
    new_model: Make, prompts_of: Callable[..., PromptBatch]
) -> None:
    model, prompts, noise = new_model(seed=3), prompts_of("ab", "abcdab", "d", "c"), uniforms(4, 12, 0, "x")
    found = []
    for decoded in (None, DecodedStates()):
        found.append(
            sample_responses(
                model, prompts.ids, prompts.mask, noise, eos_ids=[2], pad_id=0, temperature=0.8, decoded=decoded
            )
        )
    assert torch.equal(found[0].ids, found[1].ids)
