from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.models.scratch import classifier_from_lm
from rlhf_kl.reward_functions import RewardModel
from rlhf_kl.rollout.collect import Sampling, draw, measure, response_texts
from rlhf_kl.rollout.features import StateFeatures, feature_count
from rlhf_kl.rollout.sampling import Sampled
from rlhf_kl.seeding import uniforms
from rlhf_kl.trainers.reward_model import initialise_head
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba")


@pytest.fixture
def reward(new_model: Make, letters: Any) -> RewardModel:
    """An untrained reward model that reads the policy's letters."""
    model = classifier_from_lm(new_model(seed=5, hidden_size=8), letters, "reward.model")
    initialise_head(model.score, seed=1)
    return RewardModel(model.eval(), letters, rows=2)


def read_alone(model: Any, prefix: torch.Tensor) -> torch.Tensor:
    """The last state of one unpadded text in plain transformers, scaled to mean 0 and spread 1."""
    state = model.base_model(input_ids=prefix.unsqueeze(0)).last_hidden_state[0, -1]
    return (state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize("scored", [None, "as written", "other texts", "fewer texts"])
def test_values_are_those_of_each_state_alone(
    new_model: Make,
    prompts_of: Callable[..., PromptBatch],
    reward: RewardModel,
    letters: Any,
    scored: str | None,
) -> None:
    """Against one pass over each prefix, which cannot know what comes later; however the responses were scored."""
    policy, reference = new_model(seed=3), new_model(seed=2)
    rewards = [reward] if scored else []
    critic = FeatureCritic(feature_count(reference, rewards), mean=0.5, scale=2.0, seed=0)
    torch.nn.init.normal_(critic.outer.weight, generator=torch.Generator().manual_seed(0))
    features = StateFeatures(critic, rewards)
    prompts = prompts_of(*TEXTS)
    sampled = draw(policy, prompts, uniforms(len(TEXTS), 6, 0, "x"), Sampling(6, 0.8, [2], 0), "cpu")
    responses = response_texts(letters, sampled)
    if scored == "as written":
        reward(prompts.texts, responses)
    elif scored == "other texts":
        reward(prompts.texts, ["d" + response for response in responses])
    elif scored == "fewer texts":
        reward(prompts.texts[1:], responses[1:])
    model = ActorCritic(policy, critic=critic)
    measured = measure(model, reference, prompts, sampled, 0.8, features=features)
    checked = 0
    for row in range(len(TEXTS)):
        prompt = prompts.ids[row][prompts.mask[row].bool()]
        for place in range(int(sampled.mask[row].sum())):
            prefix = torch.cat([prompt, sampled.ids[row, :place]])
            expected = critic(torch.cat([read_alone(one, prefix) for one in (reference, *(r.model for r in rewards))]))
            torch.testing.assert_close(measured.values[row, place], expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > len(TEXTS)
    assert bool((measured.values[~sampled.mask] == 0).all())


def test_what_a_reward_model_read_is_not_read_again(
    new_model: Make, prompts_of: Callable[..., PromptBatch], reward: RewardModel, letters: Any
) -> None:
    policy, reference = new_model(seed=3), new_model(seed=2)
    critic = FeatureCritic(feature_count(reference, [reward]), mean=0.0, scale=1.0, seed=0)
    features, prompts = StateFeatures(critic, [reward]), prompts_of(*TEXTS)
    ids = torch.tensor([[3, 4, 5, 6, 3, 2]]).repeat(len(TEXTS), 1)  # letters, then the end: tokens that texts keep
    sampled = Sampled(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones(len(ids), dtype=torch.bool))
    reward(prompts.texts, response_texts(letters, sampled))
    rows: list[int] = []
    reward.trunk.register_forward_hook(lambda _, __, output: rows.append(len(output.last_hidden_state)))
    model = ActorCritic(policy, critic=critic)
    for _ in range(2):
        measure(model, reference, prompts, sampled, 0.8, features=features)
    assert not rows
    responses = response_texts(letters, sampled)
    reward(prompts.texts, ["d", *responses[1:]])
    rows.clear()
    measure(model, reference, prompts, sampled, 0.8, features=features)
    assert rows == [1], "the one that was scored in other tokens, and no other"


def test_scores_are_the_same_when_states_are_kept(reward: RewardModel) -> None:
    texts = ["ab", "abcdab", "", "cccc", "ba"]
    before = reward.score(["a"] * 5, texts)
    reward.keep_states()
    torch.testing.assert_close(reward.score(["a"] * 5, texts), before)


def test_a_critic_reads_the_hidden_states_of_both(new_model: Make, reward: RewardModel) -> None:
    assert feature_count(new_model(), []) == 16
    assert feature_count(new_model(), [reward]) == 24
