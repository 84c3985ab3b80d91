from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models.actor_critic import (
    PLAIN,
    ActorCritic,
    choose_way,
    freeze,
    plain_reason,
    position_ids,
    read_states,
    response_logits,
    shared_trainable,
    value_head_from_reward,
)
from rlhf_kl.models.load import load_reward_model

Make = Callable[..., Any]
ROW = [1, 3, 4, 5, 6, 3, 2]  # bos, four letters of a prompt, one of the response, eos
STATES = torch.tensor([4, 5])  # that the last two tokens were drawn from


def padded(right: int, other: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The row with padding behind it, and by request below a longer one."""
    ids, mask = torch.tensor([ROW + [0] * right]), torch.tensor([[True] * len(ROW) + [False] * right])
    if other:
        ids = torch.cat([torch.full_like(ids, 4), ids])
        mask = torch.cat([torch.ones_like(mask), mask])
    return ids, mask


@pytest.fixture
def model(new_model: Make) -> ActorCritic:
    critic = ActorCritic(new_model())
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def test_positions_count_real_tokens_only() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("right", [0, 3])
def test_neither_padding_nor_neighbours_move_logits_and_values(model: ActorCritic, right: int, plain: bool) -> None:
    setattr(model.policy, PLAIN, "a reason" if plain else None)
    alone = model(*padded(0), STATES)
    beside = model(*padded(right, other=True), len(ROW) + right + STATES)
    assert alone.logits.shape == (2, 7)
    assert alone.values.shape == (2,)
    torch.testing.assert_close(beside.logits, alone.logits, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(beside.values, alone.values, rtol=1e-5, atol=1e-4)


def test_the_logits_are_those_of_the_model_one_place_earlier(model: ActorCritic) -> None:
    ids, mask = padded(0)
    whole = model.policy(input_ids=ids).logits[:, -3:-1]
    torch.testing.assert_close(response_logits(model.policy, ids, mask, 2), whole)
    torch.testing.assert_close(read_states(model.policy, ids, mask, STATES)[0], whole[0])
    torch.testing.assert_close(model(ids, mask, STATES).logits, whole[0])


@pytest.mark.parametrize("separate", [False, True])
def test_both_ways_have_the_same_gradients(new_model: Make, separate: bool) -> None:
    found = []
    for plain in (False, True):
        model = ActorCritic(new_model(seed=1), new_model(seed=2).base_model if separate else None)
        nn.init.ones_(model.value_head.weight)
        setattr(model.policy, PLAIN, "a reason" if plain else None)
        logits, values = model(*padded(2, other=True), torch.tensor([1, 5, 13, 14]))
        (logits.log_softmax(-1)[:, 3].sum() + values.square().sum()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert float(found[0].norm()) > 0.1
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_logits_elsewhere_are_never_computed(model: ActorCritic) -> None:
    seen = []
    model.policy.lm_head.register_forward_hook(lambda _module, _args, output: seen.append(output.shape[:-1].numel()))
    model(*padded(5, other=True), STATES)
    assert seen == [2]


class _Elsewhere(nn.Module):
    """Applies the head's weights without calling the head, as some models do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = self.inner(input_ids=input_ids, **kwargs)
        hidden = self.inner.base_model(input_ids=input_ids, attention_mask=kwargs["attention_mask"]).last_hidden_state
        return SimpleNamespace(logits=hidden @ self.inner.lm_head.weight.T, hidden_states=output.hidden_states)


def test_a_model_takes_the_short_way_where_it_works(new_model: Make) -> None:
    model = new_model()
    choose_way(model)
    assert plain_reason(model) is None


def test_a_model_that_computes_its_logits_elsewhere_takes_the_plain_way(new_model: Make) -> None:
    inner = new_model()
    model = _Elsewhere(inner)
    choose_way(model)
    assert plain_reason(model) is not None
    whole = inner(input_ids=padded(0)[0]).logits[0]
    torch.testing.assert_close(read_states(model, *padded(0), STATES)[0], whole[STATES])


def test_a_value_sees_its_state_and_not_the_token_that_follows(model: ActorCritic) -> None:
    ids, mask = padded(0)
    other = ids.clone()
    other[0, -2] = 6  # another first token of the response
    before, after = (model(x, mask, STATES).values.detach() for x in (ids, other))
    assert torch.equal(before[0], after[0])
    assert float((before[1] - after[1]).abs()) > 1e-3


def test_a_new_value_head_says_zero(new_model: Make) -> None:
    assert (ActorCritic(new_model())(*padded(0), STATES).values == 0).all()


def test_a_separate_value_function_leaves_the_policy_alone(new_model: Make) -> None:
    policy = new_model(seed=1)
    model = ActorCritic(policy, copy.deepcopy(new_model(seed=2)).base_model)
    nn.init.ones_(model.value_head.weight)
    model(*padded(0), STATES).values.sum().backward()
    assert all(p.grad is None for p in policy.parameters())
    assert model.value_trunk is not None
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.value_trunk.parameters())


def test_the_separate_trunk_ignores_padding_too(new_model: Make) -> None:
    model = ActorCritic(new_model(seed=1), new_model(seed=2).base_model)
    nn.init.ones_(model.value_head.weight)
    alone, beside = model(*padded(0), STATES).values, model(*padded(4), STATES).values
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
