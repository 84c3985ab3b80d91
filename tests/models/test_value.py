from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models.lm import LM, Trunk
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.pretrained import load_reward_model
from rlhf_kl.models.value import (
    ActorCritic,
    FeatureCritic,
    HeadValue,
    SeparateValue,
    value_head_from_reward,
    zero_head,
)
from rlhf_kl.ops.packing import Packed, text_layout
from tests.made import Make

ROW = [1, 3, 4, 5, 6, 3, 2]  # bos, four letters of a prompt, one of the response, eos


def packed(*others: list[int], row: list[int] = ROW) -> Packed:
    """The states before the last two tokens of the row, others beside it."""
    rows = [row, *others]
    return text_layout(rows, [len(row) - 2 for row in rows], torch.device("cpu")).pack(range(len(rows)))


def separate(trunk: Any) -> SeparateValue:
    head = zero_head(16)
    nn.init.ones_(head.weight)
    return SeparateValue(Trunk(trunk), head)


def values(model: ActorCritic, rows: Packed) -> torch.Tensor:
    assert model.value is not None
    result: torch.Tensor = model.value(rows, model.policy(rows))  # type: ignore[misc]
    return result


@pytest.fixture(params=["head", "separate"])
def model(request: pytest.FixtureRequest, new_model: Make) -> ActorCritic:
    value: HeadValue | SeparateValue = separate(new_model(seed=2))
    if request.param == "head":
        value = HeadValue(16)
        nn.init.ones_(value.head.weight)
    return ActorCritic(LM(new_model(seed=1)), value)


def test_a_value_is_a_linear_map_of_the_last_state(model: ActorCritic) -> None:
    with torch.no_grad():
        trunk = model.value.trunk if isinstance(model.value, SeparateValue) else model.policy
        states = trunk.model.base_model(input_ids=torch.tensor([ROW])).last_hidden_state[0, 4:6]
        torch.testing.assert_close(values(model, packed()), states.sum(1), rtol=1e-4, atol=1e-4)


def test_neither_neighbours_nor_later_tokens_move_a_value(model: ActorCritic) -> None:
    with torch.no_grad():
        alone = values(model, packed())
        beside = values(model, packed([1, 4, 4], [1, 6, 6, 6, 6, 6, 6, 6, 6]))
        torch.testing.assert_close(beside[:2], alone, rtol=1e-5, atol=1e-4)
        after = values(model, packed(row=[*ROW[:5], 6, 2]))  # another first token of the response
    torch.testing.assert_close(after[0], alone[0], rtol=1e-5, atol=1e-5)
    assert float((after[1] - alone[1]).abs()) > 1e-3


def test_values_are_float32_where_the_layers_are_not(new_model: Make) -> None:
    """Far from 0, where bfloat16 has steps of 0.5: on the same states a value is the float64 one."""
    lm, value = LM(new_model(), torch.bfloat16), HeadValue(16)
    nn.init.constant_(value.head.bias, 100.0)
    nn.init.normal_(value.head.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = lm.hidden(packed())
        with lm.precision():
            result = value(packed(), hidden)
        exact = hidden.double() @ value.head.weight[0].double() + 100.0
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=1e-4)
    assert float((exact.bfloat16() - exact).abs().max()) > 5e-3


def test_a_head_teaches_the_policy_and_a_separate_function_leaves_it_alone(model: ActorCritic) -> None:
    values(model, packed()).sum().backward()
    moved = {id(p) for p in model.trained if p.grad is not None and bool(p.grad.any())}
    in_policy = {id(p) for p in model.policy.module.parameters()}
    assert moved - in_policy, "the value function's own"
    assert bool(moved & in_policy) == isinstance(model.value, HeadValue)


def test_what_is_trained_and_saved(new_model: Make) -> None:
    policy, value, critic = new_model(), HeadValue(16), FeatureCritic(16, 0.0, 1.0, seed=0)
    lm = LM(policy)
    assert list(ActorCritic(lm, value).modules) == ["policy", "value"]
    assert list(ActorCritic(lm, critic=critic).modules) == ["policy", "critic"]
    assert set(ActorCritic(lm, value).trained) == {*policy.parameters(), *value.parameters()}
    assert set(ActorCritic(lm, critic=critic).trained) == set(policy.parameters())
    adapted = add_adapter(new_model(), r=2, alpha=4.0, target_modules=None, ref="base", seed=1)
    trained = {id(p) for p in ActorCritic(LM(adapted), value).trained}
    names = {name.split(".")[-3] for name, p in adapted.named_parameters() if id(p) in trained}
    assert names == {"lora_A", "lora_B"}


def test_a_value_head_from_a_reward_model_gives_its_normalised_score(tiny_reward_folder: Any) -> None:
    reward = load_reward_model(str(tiny_reward_folder))
    ids = torch.tensor([ROW])
    with torch.no_grad():
        score = reward(input_ids=ids).logits[0, 0]  # of the last token
        hidden = reward.base_model(input_ids=ids).last_hidden_state[0, -1]
        value = value_head_from_reward(reward.score, mean=0.5, std=2.0)(hidden)
    assert float(value) * 2.0 + 0.5 == pytest.approx(float(score), abs=1e-5)
