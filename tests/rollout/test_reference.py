from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.rollout import reference as module
from rlhf_kl.rollout.collect import Sampling, assemble, draw, exact_kl_now, measure
from rlhf_kl.rollout.reference import ReferenceLogits
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba")


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_a_rollout_asks_the_reference_once_where_there_is_room(
    new_model: Make, prompts_of: Callable[..., PromptBatch], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(module, "KEPT_ELEMENTS", room)
    policy, reference = new_model(seed=3), new_model(seed=2)
    passes = []
    reference.register_forward_hook(lambda *_: passes.append(1))
    kept, model = ReferenceLogits(reference, keep=True), ActorCritic(policy)
    for noise in ("x", "y"):  # the second rollout must not see the first one's logits
        prompts = prompts_of(*TEXTS)
        sampled = draw(policy, prompts, uniforms(len(TEXTS), 6, 0, noise), Sampling(6, 0.8, [2], 0), "cpu")
        measured = measure(model, reference, prompts, sampled, 0.8, kept)
        rollout = assemble(prompts, sampled, measured, torch.zeros(5), torch.zeros(5))
        scored = len(passes)
        again = exact_kl_now(model, kept, rollout, 0.8)
        assert (len(passes) == scored) == bool(room)
        torch.testing.assert_close(again, exact_kl_now(model, ReferenceLogits(reference), rollout, 0.8))
