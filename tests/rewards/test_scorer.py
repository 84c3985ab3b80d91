from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import load_reward_model, load_tokenizer
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers, mean_metrics
from tests.made import BATCH, first_of


def returns(value: Any) -> PluginReward:
    return PluginReward(lambda prompts, responses: value)


def sum_of(**terms: tuple[float, Any]) -> Scorers:
    return Scorers(*(Scorer(f"terms.{name}", call, weight) for name, (weight, call) in terms.items()))


def test_a_sum_and_what_each_term_adds_to_it() -> None:
    """As TRL adds up several functions: None adds nothing, and a response without any score has none."""
    x, y = returns([1.0, None, None]), returns([10.0, 20.0, None])
    values = sum_of(x=(2.0, x), y=(-0.5, y))(BATCH)
    assert values["reward"][:2].tolist() == [-3.0, -10.0]
    assert values["reward"].isnan().tolist() == [False, False, True]
    assert values["terms.x"][0] == 2.0
    assert values["terms.y"][:2].tolist() == [-5.0, -10.0]
    assert values["terms.x"].isnan().tolist() == [False, True, True]


def test_a_term_of_weight_0_is_no_score() -> None:
    values = sum_of(x=(1.0, returns([1.0, None, 2.0])), watched=(0.0, returns([5.0, 5.0, 5.0])))(BATCH)
    assert values["reward"].isnan().tolist() == [False, True, False]


def test_a_failing_scorer_is_named_by_its_key_and_one_that_never_trains_costs_its_scores_alone() -> None:
    good, bad, calls = returns([1.0, 2.0, None]), returns([1.0]), list[int]()
    with pytest.raises(InputError, match=r"^reward\.terms\.y: returned 1 scores"):
        sum_of(x=(1.0, good), y=(1.0, bad))(BATCH)

    def fails(prompts: Any, responses: Any) -> Any:
        raise ValueError(calls.append(1))

    every = {"reward": good, "scorers.good": good, "scorers.bad": bad, "scorers.fails": PluginReward(fails)}
    scorers, failures = Scorers(*(Scorer(name, call) for name, call in every.items())), dict[str, str]()
    assert scorers(BATCH)["reward"].tolist()[:2] == [1.0, 2.0]
    for _ in range(2):
        found = scorers.judge(BATCH, failures)
        assert found["reward"][:2] == found["good"][:2] == [1.0, 2.0]
        assert list(map(math.isnan, [*found["good"], *found["bad"], *found["fails"]])) == [False] * 2 + [True] * 7
    assert len(calls) == 1  # one that failed is not asked again
    assert list(failures) == ["bad", "fails"]
    assert re.match("returned 1 .*'first'", failures["bad"])
    assert Scorer("scorers.bad", bad).key == "eval.scorers.bad"
    assert [scorer.name for scorer in scorers.trained.scorers] == ["reward"]
    alone = Scorers(Scorer("scorers.good", good))
    assert (alone(BATCH), list(alone.judge(BATCH, {}))) == ({}, ["good"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_models_score_that_is_not_finite_is_a_score(tiny_reward_folder: Path, value: float) -> None:
    """NaN would mean that it gave none."""
    model = load_reward_model(str(tiny_reward_folder))
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("d")] = value
    terms = sum_of(model=(0.5, RewardModel(model, tokenizer)), count=(2.0, returns([1.0, -1e38, 1.0])))
    values = terms(BATCH._replace(texts=["bb", "dd", "cc"]))
    assert values["terms.model"].isinf().tolist() == values["reward"].isinf().tolist() == [False, True, False]
    failures = dict[str, str]()
    alone = Scorers(Scorer("scorers.model", RewardModel(model, tokenizer)))
    assert all(map(math.isnan, alone.judge(BATCH._replace(texts=["bb", "dd", "cc"]), failures)["model"]))
    assert "finite" in failures["model"]


class Counts:
    """Every score is the number of responses seen before it."""

    def __init__(self, start: int = 0) -> None:
        self.seen = start

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.seen += len(responses)
        return [float(self.seen - len(responses) + i) for i in range(len(responses))]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Fails(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no disk")


def scorers(kind: Callable[..., Any] = Counts) -> Scorers:
    one, two = PluginReward(kind, {"start": 10}), PluginReward(Counts, {"start": 30})
    return Scorers(Scorer("terms.a", one), Scorer("terms.b", returns([0.0])), Scorer("scorers.gold", two))


def test_states_go_into_a_checkpoint_and_back_and_an_evaluation_leaves_them_as_they_were() -> None:
    made, again = scorers(), scorers()
    made.judge(first_of(BATCH, 1), {})
    states = made.state_dict()
    assert states == {"terms.a": {"seen": 11}, "scorers.gold": {"seen": 31}}
    again.load_state_dict(states)
    with again.kept():
        again.judge(first_of(BATCH, 1), {})
    assert again.state_dict() == states


def test_a_state_that_fails_is_told_by_its_key() -> None:
    with pytest.raises(InputError, match=r"^reward\.terms\.a: state_dict raised ValueError: "):
        scorers(kind=Fails).state_dict()


def test_metrics_of_several_processes_are_one_mean() -> None:
    found = mean_metrics([{"log/x": [1.0, 2.0]}, {"log/x": [6.0], "log/y": [math.pi]}])
    assert found == {"log/x": 3.0, "log/y": math.pi}
