from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.rollout.collect import Sampling, draw, measure
from rlhf_kl.rollout.features import StateFeatures, feature_count
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba")


@pytest.mark.parametrize("with_reward", [False, True])
def test_values_are_those_of_each_state_alone(
    new_model: Make, prompts_of: Callable[..., PromptBatch], with_reward: bool
) -> None:
    """Against one unpadded pass of plain transformers over each prefix, which cannot know what comes later."""
    policy, reference = new_model(seed=3), new_model(seed=2)
    trunks = [new_model(seed=5, hidden_size=8).base_model] if with_reward else []
    critic = FeatureCritic(feature_count(reference, trunks), mean=0.5, scale=2.0, seed=0)
    torch.nn.init.normal_(critic.outer.weight, generator=torch.Generator().manual_seed(0))
    prompts = prompts_of(*TEXTS)
    sampled = draw(policy, prompts, uniforms(len(TEXTS), 6, 0, "x"), Sampling(6, 0.8, [2], 0), "cpu")
    model = ActorCritic(policy, critic=critic)
    measured = measure(model, reference, prompts, sampled, 0.8, features=StateFeatures(critic, trunks))
    checked = 0
    for row in range(len(TEXTS)):
        prompt = prompts.ids[row][prompts.mask[row].bool()]
        for place in range(int(sampled.mask[row].sum())):
            prefix = torch.cat([prompt, sampled.ids[row, :place]]).unsqueeze(0)
            parts = []
            for trunk in (reference.base_model, *trunks):
                state = trunk(input_ids=prefix).last_hidden_state[0, -1]
                parts.append((state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt())
            expected = critic(torch.cat(parts))
            torch.testing.assert_close(measured.values[row, place], expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > len(TEXTS)
    assert bool((measured.values[~sampled.mask] == 0).all())


def test_a_critic_reads_the_hidden_states_of_both(new_model: Make) -> None:
    assert feature_count(new_model(), []) == 16
    assert feature_count(new_model(), [new_model(hidden_size=8).base_model]) == 24
