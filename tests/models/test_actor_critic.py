from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models.actor_critic import (
    ActorCritic,
    freeze,
    position_ids,
    response_logits,
    shared_trainable,
    value_head_from_reward,
)
from rlhf_kl.models.load import load_reward_model

Make = Callable[..., Any]
ROW = [1, 3, 4, 5, 6, 3, 2]  # bos, four letters of a prompt, one of the response, eos
WIDTH = 2


def padded(left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[0] * left + ROW + [0] * right])
    mask = torch.tensor([[False] * left + [True] * len(ROW) + [False] * right])
    return ids, mask


@pytest.fixture
def model(new_model: Make) -> ActorCritic:
    critic = ActorCritic(new_model())
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def test_positions_count_real_tokens_only() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 2), (5, 1)])
def test_padding_moves_neither_logits_nor_values(model: ActorCritic, left: int, right: int) -> None:
    alone = model(*padded(0, 0), WIDTH)
    beside = model(*padded(left, right), WIDTH + right)
    assert alone.logits.shape == (1, WIDTH, 7)
    assert alone.values.shape == (1, WIDTH)
    torch.testing.assert_close(beside.logits[:, :WIDTH], alone.logits, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(beside.values[:, :WIDTH], alone.values, rtol=1e-5, atol=1e-4)


def test_the_logits_are_those_of_the_model_one_place_earlier(model: ActorCritic) -> None:
    ids, mask = padded(0, 0)
    whole = model.policy(input_ids=ids).logits[:, -WIDTH - 1 : -1]
    torch.testing.assert_close(response_logits(model.policy, ids, mask, WIDTH), whole)
    torch.testing.assert_close(model(ids, mask, WIDTH).logits, whole)


def test_a_value_sees_its_state_and_not_the_token_that_follows(model: ActorCritic) -> None:
    ids, mask = padded(0, 0)
    other = ids.clone()
    other[0, -2] = 6  # another first token of the response
    before, after = (model(x, mask, WIDTH).values.detach() for x in (ids, other))
    assert torch.equal(before[:, 0], after[:, 0])
    assert float((before[:, 1] - after[:, 1]).abs()) > 1e-3


def test_a_new_value_head_says_zero(new_model: Make) -> None:
    assert (ActorCritic(new_model())(*padded(0, 0), WIDTH).values == 0).all()


def test_a_separate_value_function_leaves_the_policy_alone(new_model: Make) -> None:
    policy = new_model(seed=1)
    model = ActorCritic(policy, copy.deepcopy(new_model(seed=2)).base_model)
    nn.init.ones_(model.value_head.weight)
    model(*padded(0, 0), WIDTH).values.sum().backward()
    assert all(p.grad is None for p in policy.parameters())
    assert model.value_trunk is not None
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.value_trunk.parameters())


def test_the_separate_trunk_ignores_padding_too(new_model: Make) -> None:
    model = ActorCritic(new_model(seed=1), new_model(seed=2).base_model)
    nn.init.ones_(model.value_head.weight)
    alone, beside = model(*padded(0, 0), WIDTH).values, model(*padded(4, 0), WIDTH).values
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-4)


def test_a_value_head_from_a_reward_model_says_its_normalised_score(tiny_reward_folder: Any) -> None:
    reward = load_reward_model(str(tiny_reward_folder))
    ids = torch.tensor([ROW])
    with torch.no_grad():
        score = reward(input_ids=ids).logits[0, 0]  # of the last token
        hidden = reward.base_model(input_ids=ids).last_hidden_state[0, -1]
        value = value_head_from_reward(reward.score, mean=0.5, std=2.0)(hidden)
    assert float(value) == pytest.approx(float((score - 0.5) / 2.0), abs=1e-5)


def test_shared_tensors_are_found(new_model: Make) -> None:
    policy = new_model()
    assert shared_trainable(ActorCritic(policy), copy.deepcopy(policy)) == []
    assert shared_trainable(ActorCritic(policy), policy) != []
    partly = copy.deepcopy(policy)
    partly.transformer.ln_f.weight = policy.transformer.ln_f.weight
    assert shared_trainable(ActorCritic(policy), partly) == ["policy.transformer.ln_f.weight"]


def test_a_frozen_model_has_no_gradients(new_model: Make) -> None:
    model = freeze(new_model().train())
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
