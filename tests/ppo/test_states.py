from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_kl.models.lm import LM
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.models.text import decode_responses
from rlhf_kl.models.value import ActorCritic, FeatureCritic, frozen_lm
from rlhf_kl.ppo.rollout import TokenStats, measure, response_layout
from rlhf_kl.ppo.states import ReferenceStates, StateFeatures
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Prompts, Sampled, Sampling
from tests.made import Make

TEXTS = ("ab", "abcdab", "d", "cccc", "ba")


@pytest.fixture
def reward(new_model: Make, letters: Any, monkeypatch: pytest.MonkeyPatch) -> RewardModel:
    """An untrained reward model that reads the policy's letters."""
    model = classifier_from_lm(new_model(seed=5, hidden_size=8), letters)
    initialise_head(model.score, seed=1)
    monkeypatch.setattr("rlhf_kl.rewards.model.SCORING_ROWS", 2)
    return RewardModel(model.eval(), letters)


def read_alone(model: Any, prefix: torch.Tensor) -> torch.Tensor:
    """The last state of one unpadded text in plain transformers, scaled to mean 0 and spread 1."""
    state = model.base_model(input_ids=prefix.unsqueeze(0)).last_hidden_state[0, -1]
    return (state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt()


class World:
    """A policy, its reference, and a critic that reads the reference and perhaps a reward model."""

    def __init__(self, new_model: Make, prompts: Prompts, rewards: list[RewardModel]) -> None:
        self.policy, self.prompts, self.rewards = LM(new_model(seed=3)), prompts, rewards
        self.reference = ReferenceStates(frozen_lm(new_model(seed=2), torch.float32, torch.device("cpu")))
        self.critic = FeatureCritic(16 + 8 * len(rewards), mean=0.5, scale=2.0, seed=0)
        torch.nn.init.normal_(self.critic.outer.weight, generator=torch.Generator().manual_seed(0))
        self.features = StateFeatures(self.critic, rewards)

    def measure(self, sampled: Sampled) -> TokenStats:
        model = ActorCritic(self.policy, critic=self.critic)
        return measure(model, self.reference, response_layout(self.prompts.ids, sampled), 0.8, self.features)


SCORED: dict[str, Make] = {
    "as written": lambda prompts, responses: (prompts, responses),
    "other texts": lambda prompts, responses: (prompts, ["d" + response for response in responses]),
    "fewer texts": lambda prompts, responses: (prompts[1:], responses[1:]),
    "more texts": lambda prompts, responses: ([*prompts, "a"], [*responses, "b"]),
}


@pytest.mark.parametrize("scored", [None, *SCORED])
def test_values_are_those_of_each_state_alone(
    new_model: Make, prompts_of: Make, reward: RewardModel, letters: Any, scored: str | None
) -> None:
    """Against one pass over each prefix, which cannot know what comes later; however the responses were scored."""
    prompts = prompts_of(*TEXTS)
    world = World(new_model, prompts, [reward] if scored else [])
    sampled = world.policy.sample(prompts.ids, uniforms(len(TEXTS), 6, 0, "x"), Sampling(6, 0.8, [2], 0))
    responses = decode_responses(letters, sampled.rows(), [2])
    if scored:
        reward.score(*SCORED[scored](prompts.texts, responses))
    stats = world.measure(sampled)
    models = [world.reference.lm.model, *(reward.model for reward in world.rewards)]
    checked = 0
    for row in range(len(TEXTS)):
        prompt = torch.tensor(prompts.ids[row])
        for place in range(int(sampled.mask[row].sum())):
            prefix = torch.cat([prompt, sampled.ids[row, :place]])
            expected = world.critic(torch.cat([read_alone(model, prefix) for model in models]))
            torch.testing.assert_close(stats.values[row, place], expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > len(TEXTS)
    assert bool((stats.values[~sampled.mask] == 0).all())


def test_what_a_reward_model_read_is_not_read_again(
    new_model: Make, prompts_of: Make, reward: RewardModel, letters: Any
) -> None:
    prompts = prompts_of(*TEXTS)
    world = World(new_model, prompts, [reward])
    ids = torch.tensor([[3, 4, 5, 6, 3, 2]]).repeat(len(TEXTS), 1)  # letters, then the end: tokens that texts keep
    every = torch.ones_like(ids, dtype=torch.bool)
    sampled = Sampled(ids, every, every[:, 0], torch.zeros(ids.shape))
    responses = decode_responses(letters, sampled.rows(), [2])
    reward.score(prompts.texts, responses)
    rows: list[int] = []
    reward.model.base_model.register_forward_hook(lambda _, __, output: rows.append(len(output.last_hidden_state)))
    for _ in range(2):
        world.measure(sampled)
    assert not rows
    reward.score(prompts.texts, ["d", *responses[1:]])
    rows.clear()
    world.measure(sampled)
    assert rows == [1], "the one that was scored in other tokens, and no other"
