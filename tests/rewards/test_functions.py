from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.models.load import SAFE, load_reward_model, load_tokenizer
from rlhf_kl.rewards.functions import WeightedSum, checked_scores, gold_scores_of, score_responses
from rlhf_kl.rewards.model import RewardModel, text_format
from rlhf_kl.rewards.plugin import PluginReward

PROMPTS, RESPONSES = ["p", "q", "r"], ["first", "second", "third"]


def problem(reward: Callable[..., Any]) -> str:
    with pytest.raises(InputError) as caught:
        checked_scores(reward, PROMPTS, RESPONSES, "mine.py:score")
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith("reward mine.py:score: ")
    return str(caught.value)


def returns(value: Any) -> Callable[..., Any]:
    return lambda prompts, responses: value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", True, [1.0]])
def test_a_score_that_is_no_finite_number_names_its_sample(value: Any) -> None:
    message = problem(returns([1.0, value, 2.0]))
    assert "'second'" in message
    assert repr(value) in message


def test_a_number_too_large_for_float32_names_its_sample() -> None:
    assert "'third'" in problem(returns([1.0, 2.0, 1e300]))


@pytest.mark.parametrize("value", [[1.0, 2.0], [1.0] * 4, []])
def test_too_few_or_too_many_scores(value: list[float]) -> None:
    assert f"returned {len(value)} scores for 3 responses" in problem(returns(value))


@pytest.mark.parametrize("value", [None, 3.0])
def test_something_that_is_no_list(value: Any) -> None:
    assert f"returned {type(value).__name__}, not one number per response" in problem(returns(value))


def test_a_table_of_scores_instead_of_a_column() -> None:
    problem(returns(torch.zeros(3, 2)))


def test_whatever_it_raises_is_told() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [1 / 0 for _ in responses]

    line = broken.__code__.co_firstlineno + 1
    assert f"raised ZeroDivisionError: division by zero (test_functions.py:{line})" in problem(broken)
    assert "raised TypeError" in problem(lambda responses: [1.0])


def test_a_function_or_class_that_exits_does_not_end_the_program() -> None:
    def leaves(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        if RESPONSES[1] in responses:
            sys.exit(3)
        return [1.0] * len(responses)

    class Leaves:
        def __init__(self) -> None:
            sys.exit(3)

    for function in (leaves, PluginReward(leaves, {}, 5.0)):
        assert "raised SystemExit: 3 (test_functions.py:" in problem(function)
    with pytest.raises(InputError, match="reward Leaves: cannot be created: raised SystemExit: 3"):
        PluginReward(Leaves, {})


def test_a_generator_that_breaks_half_way() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> Any:
        yield 1.0
        raise KeyError("word")

    assert "raised KeyError" in problem(broken)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.0, -3.5],
        (1, 2.0, -3.5),
        torch.tensor([1, 2.0, -3.5]),
        torch.tensor([1, 2.0, -3.5]).numpy(),
        [torch.tensor(1), torch.tensor(2.0), torch.tensor(-3.5)],
    ],
    ids=["list", "tuple", "tensor", "array", "scalars"],
)
def test_numbers_of_every_make_are_taken(value: Any) -> None:
    scores = checked_scores(returns(value), PROMPTS, RESPONSES, "x")
    assert scores.tolist() == [1.0, 2.0, -3.5]
    assert scores.dtype == torch.float32


def test_a_generator_is_taken_too() -> None:
    scores = checked_scores(lambda p, r: (float(len(x)) for x in r), PROMPTS, RESPONSES, "x")
    assert scores.tolist() == [5.0, 6.0, 5.0]


def test_functions_and_classes_get_their_options() -> None:
    def words(prompts: Sequence[str], responses: Sequence[str], goal: int = 5) -> list[float]:
        return [float(goal - len(response)) for response in responses]

    class Words:
        def __init__(self, goal: int) -> None:
            self.goal = goal

        def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            return words(prompts, responses, self.goal)

    for made in (PluginReward(words, {"goal": 6}), PluginReward(Words, {"goal": 6})):
        assert made(PROMPTS, RESPONSES) == [1.0, 0.0, 1.0]


def test_a_sum_of_scorers_that_misbehave_names_the_one() -> None:
    good, bad = returns([1.0, 2.0, 3.0]), returns([1.0])
    assert WeightedSum({"x": (2.0, good), "y": (-0.5, good)})(PROMPTS, RESPONSES) == [1.5, 3.0, 4.5]
    with pytest.raises(InputError, match="reward y: returned 1 scores"):
        WeightedSum({"x": (1.0, good), "y": (1.0, bad)})(PROMPTS, RESPONSES)
    with pytest.raises(InputError, match=r"range of float32; largest absolute value of each term: x 3, y 3e\+300"):
        WeightedSum({"x": (1.0, good), "y": (1e300, good)})(PROMPTS, RESPONSES)


def test_a_sum_says_what_each_term_adds() -> None:
    total, _, parts = WeightedSum({"x": (2.0, returns([1.0, 2.0, 3.0])), "y": (-1.0, returns([0.0, 1.0, 5.0]))}).score(
        PROMPTS, RESPONSES
    )
    assert total.tolist() == [2.0, 3.0, 1.0]
    assert {name: part.tolist() for name, part in parts.items()} == {"x": [2.0, 4.0, 6.0], "y": [0.0, -1.0, -5.0]}


def test_of_a_plain_function_there_are_no_terms() -> None:
    scores, scored, terms = score_responses(returns([1.0, 2.0, 3.0]), PROMPTS, RESPONSES, "x")
    assert bool(scored.all())
    assert (scores.tolist(), terms) == ([1.0, 2.0, 3.0], {})
    summed, _, terms = score_responses(WeightedSum({"y": (2.0, returns([1.0, 2.0, 3.0]))}), PROMPTS, RESPONSES, "x")
    assert summed.tolist() == terms["y"].tolist() == [2.0, 4.0, 6.0]


def test_gold_scores_are_checked_where_there_is_a_gold_scorer() -> None:
    assert gold_scores_of(None, PROMPTS, RESPONSES) == (None, None)
    assert gold_scores_of(returns([1, 2, 3]), PROMPTS, RESPONSES) == ([1.0, 2.0, 3.0], None)


def test_a_gold_scorer_that_misbehaves_costs_its_scores_alone() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        raise ConnectionError("no route")

    for gold, words in (
        (returns([1]), "returned 1 scores"),
        (returns([1.0, float("nan"), 2.0]), "the score of 'second' is nan"),
        (broken, "raised ConnectionError: no route"),
        (PluginReward(lambda prompts, responses: time.sleep(5), {}, 0.05), "time_limit"),
    ):
        scores, failure = gold_scores_of(gold, PROMPTS, RESPONSES)
        assert scores is None
        assert failure is not None
        assert failure.startswith("reward gold: ")
        assert words in failure


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_models_score_in_a_sum_may_be_anything(tiny_reward_folder: Path, value: float) -> None:
    """The caller leaves such an update out; a function's own is refused as ever."""
    model = load_reward_model(str(tiny_reward_folder), "reward.model", SAFE)
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("d")] = value
    scorer = RewardModel(model, tokenizer, form=text_format(model))
    terms = {"model": (0.5, scorer), "count": (2.0, returns([1.0, 1.0, 1.0]))}
    prompts, responses = ["a", "a", "a"], ["bb", "dd", "cc"]
    total, _, parts = WeightedSum(terms).score(prompts, responses)
    assert torch.isfinite(total).tolist() == [True, False, True]
    assert torch.isfinite(parts["model"]).tolist() == [True, False, True]
    with pytest.raises(InputError, match="reward count: the score of 'dd' is nan"):
        WeightedSum(terms | {"count": (2.0, returns([1.0, float("nan"), 1.0]))}).score(prompts, responses)


def test_a_response_that_is_not_scored_counts_in_no_sum() -> None:
    """As TRL adds up several functions: None adds nothing, and a response without any score has none."""
    some, others = returns([1.0, None, None]), returns([10.0, 20.0, None])
    values, scored, terms = score_responses(some, PROMPTS, RESPONSES, "x")
    assert values.tolist() == [1.0, 0.0, 0.0]
    assert scored.tolist() == [True, False, False]
    assert terms == {}
    both = WeightedSum({"a": (2.0, some), "b": (0.5, others)})
    values, scored, terms = score_responses(both, PROMPTS, RESPONSES, "x")
    assert values.tolist() == [7.0, 10.0, 0.0]
    assert scored.tolist() == [True, True, False]
    assert float(terms["a"].nanmean()) == 2.0
    assert both(PROMPTS, RESPONSES) == [7.0, 10.0, None]
    gold = gold_scores_of(some, PROMPTS, RESPONSES)
    assert (gold.scores, gold.failure, gold.mean) == ([1.0, None, None], None, 1.0)
