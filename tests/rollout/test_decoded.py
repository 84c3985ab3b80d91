from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.rollout import decoding, sampling
from rlhf_kl.rollout.collect import Sampling, draw, measure
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba", "cd", "aaaa", "b") * 3


@pytest.mark.parametrize("compact_below", [0.99, 0.0])
@pytest.mark.parametrize("separate", [False, True])
def test_what_is_kept_from_sampling_is_what_whole_rows_say(
    new_model: Make,
    prompts_of: Callable[..., PromptBatch],
    monkeypatch: pytest.MonkeyPatch,
    separate: bool,
    compact_below: float,
) -> None:
    monkeypatch.setattr(sampling, "COMPACT_BELOW", compact_below)
    policy, reference = new_model(seed=3), new_model(seed=2)
    model = ActorCritic(policy, new_model(seed=5).base_model if separate else None)
    nn.init.ones_(model.value_head.weight)
    decoded, prompts = DecodedStates(), prompts_of(*TEXTS)
    noise = uniforms(len(TEXTS), 12, 0, "x")
    sampled = draw(policy, prompts, noise, Sampling(12, 0.8, [2, 5], 0), "cpu", decoded)
    assert len(set(sampled.mask.sum(1).tolist())) > 3
    assert (len(decoded.rows[-1]) < len(TEXTS)) == bool(compact_below)  # rows that are done leave the batch
    whole = vars(measure(model, reference, prompts, sampled, 0.8))
    for name, tensor in vars(measure(model, reference, prompts, sampled, 0.8, decoded=decoded)).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


def test_rows_leave_without_a_trace(
    new_model: Make, prompts_of: Callable[..., PromptBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens whether finished rows stay or go, and in the model's own cache or ours."""
    model, prompts, noise = new_model(seed=3), prompts_of(*TEXTS), uniforms(len(TEXTS), 12, 0, "x")
    found = []
    for share, reserve in ((0.99, decoding.reserve), (0.0, decoding.reserve), (0.99, lambda *_: False)):
        monkeypatch.setattr(sampling, "COMPACT_BELOW", share)
        monkeypatch.setattr(decoding, "reserve", reserve)
        found.append(draw(model, prompts, noise, Sampling(12, 1.0, [2, 5], 0), "cpu"))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
