from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.value import ActorCritic, frozen_lm
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.rollout.collect import Assessor, exact_kl_now, respond
from rlhf_kl.rollout.reference import ReferenceStates, reading_passes
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch, RolloutBatch, Sampling

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba")


class World:
    def __init__(self, new_model: Make, prompts: PromptBatch, letters: Any) -> None:
        self.policy, self.prompts, self.letters = TransformersLM(new_model(seed=3)), prompts, letters
        self.reference = ReferenceStates(frozen_lm(new_model(seed=2), torch.float32, torch.device("cpu")))

    def rollout(self, noise: str, eos: tuple[int, ...] = (2,)) -> RolloutBatch:
        responses = respond(
            self.policy, self.prompts, uniforms(5, 6, 0, noise), Sampling(6, 0.8, list(eos), 0), self.letters
        )
        model, shaping = ActorCritic(self.policy), ScoreShaping()
        scorers = Scorers(Scorer("reward", PluginReward(lambda p, r: [1.0] * len(r))))
        return Assessor(model, self.reference, None, scorers, shaping, 0.8)(responses)


def test_its_logits_are_those_of_its_own_pass(
    new_model: Make, prompts_of: Callable[..., PromptBatch], letters: Any, own_logits: Make
) -> None:
    """Of the rollout that was read last, in any order of its tokens."""
    world = World(new_model, prompts_of(*TEXTS), letters)
    for noise, eos in (("x", ()), ("y", ()), ("z", (2,))):  # the first two have as many tokens
        rollout = world.rollout(noise, eos)
        mask = torch.cat([rollout.prompt_mask, rollout.mask], 1)
        rows = [row[keep] for row, keep in zip(rollout.input_ids, mask, strict=True)]
        own = [
            own_logits(world.reference.lm.model, row)[-length - 1 : -1]
            for row, length in zip(rows, rollout.lengths.tolist(), strict=True)
        ]
        expected, order = torch.cat(own), torch.randperm(rollout.layout.tokens)
        result = world.reference.logits(order)
        torch.testing.assert_close(result.double(), expected[order], rtol=1e-4, atol=1e-4)
        assert not result.requires_grad


def test_a_rollout_costs_one_reading_of_its_rows(
    new_model: Make, prompts_of: Callable[..., PromptBatch], letters: Any
) -> None:
    world, rows = World(new_model, prompts_of(*TEXTS), letters), []
    trunk = world.reference.lm.model.base_model
    trunk.register_forward_pre_hook(lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    for noise in ("x", "y"):
        rollout = world.rollout(noise)
        for _ in range(2):
            exact_kl_now(world.policy, world.reference, rollout, 0.8)
    assert sum(rows) == 2 * len(TEXTS)


def test_passes_hold_the_rows_asked_for(new_model: Make, prompts_of: Callable[..., PromptBatch], letters: Any) -> None:
    layout = World(new_model, prompts_of(*TEXTS), letters).rollout("x").layout
    for rows in (None, [1, 3]):
        numbers = sorted(torch.cat([packed.numbers for packed in reading_passes(layout, rows)]).tolist())
        first = layout.first.tolist()
        chosen = range(len(TEXTS)) if rows is None else rows
        assert numbers == [n for row in chosen for n in range(first[row], first[row] + int(layout.responses[row]))]
