from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.plugins import filled
from rlhf_kl.rewards.plugin import OwnThread, PluginReward, TimeLimitExceeded
from rlhf_kl.rewards.trl import TRLReward
from rlhf_kl.types import Prompts, Responses

RESPONSES = ["first", "second", "third"]
BATCH = Responses(Prompts(["p", "q", "r"], [[]] * 3, [{}] * 3, [()] * 3), RESPONSES, [[1], [2], [3]])


def problem(reward: Callable[..., Any]) -> str:
    with pytest.raises(InputError) as caught:
        PluginReward(reward)(BATCH)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def returns(value: Any) -> Callable[..., Any]:
    return lambda prompts, responses: value


# ---- scores


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", [1.0], 1e300])
def test_a_score_that_is_no_finite_number_names_its_sample(value: Any) -> None:
    message = problem(returns([1.0, value, 2.0]))
    assert "'second'" in message
    assert repr(value) in message


def test_something_that_is_not_one_number_a_response() -> None:
    assert "returned 2 scores for 3 responses" in problem(returns([1.0, 2.0]))
    assert "returned NoneType, not one number per response" in problem(returns(None))
    assert "not a finite number" in problem(returns(torch.zeros(3, 2)))


@pytest.mark.parametrize(
    "value",
    [
        dict.fromkeys(RESPONSES, 1.0),
        {1.0, 2.0, 3.0},
        frozenset({1.0, 2.0, 3.0}),
        {1.0: 0, 2.0: 0, 3.0: 0}.keys(),
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        pandas.DataFrame([[0.1, 0.2, 0.3]] * 3),  # its columns are named 0, 1 and 2
        "123",
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_score_in_the_place_of_each_response_is_refused(value: Any) -> None:
    name = type(value).__name__
    assert f"returned {name}, not one number per response" in problem(returns(value))
    with pytest.raises(InputError, match=f"returned {name}, not one number per response"):
        TRLReward(lambda prompts, completions: value)(BATCH)


@pytest.mark.parametrize(
    "value", [[True, False, None], np.array([True, False, False]), torch.tensor([True, False, False]), [1.0, 0.0, 0.0]]
)
def test_true_is_one_and_false_is_zero(value: Any) -> None:
    assert PluginReward(returns(value))(BATCH)[:2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("limit", [None, 60.0])
def test_an_async_function_is_awaited(limit: float | None) -> None:
    async def slow(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(response)) for response in responses]

    class Judge:
        async def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            return await slow(prompts, responses)

    for attribute in (slow, Judge):
        assert PluginReward(attribute, {}, limit)(BATCH).tolist() == [5.0, 6.0, 5.0]


def test_whatever_it_raises_is_told_with_its_line() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> Any:
        yield 1.0
        raise KeyError("word")

    def leaves(prompts: Sequence[str], responses: Sequence[str]) -> Any:
        sys.exit(3)

    line = broken.__code__.co_firstlineno + 2
    assert f"raised KeyError: 'word' (test_plugin.py:{line})" in problem(broken)
    assert "raised TypeError" in problem(lambda responses: [1.0])
    assert "raised SystemExit: 3 (test_plugin.py:" in problem(leaves)


@pytest.mark.parametrize("make", [tuple, torch.tensor, np.array, lambda numbers: (torch.tensor(x) for x in numbers)])
def test_numbers_of_every_make_are_taken(make: Callable[..., Any]) -> None:
    scores = PluginReward(returns(make([1, 2.0, -3.5])))(BATCH)
    assert (scores.dtype, scores.tolist()) == (torch.float32, [1.0, 2.0, -3.5])
    assert PluginReward(returns([1, 2.0, None]))(BATCH).isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    "value",
    [np.array([1.0, np.nan]), [np.True_, np.float32("nan")], torch.tensor([1.0, float("nan")]), (True, None)],
    ids=["numpy", "scalars", "torch", "tuple"],
)
def test_for_trl_true_is_one_and_nan_no_score(value: Any) -> None:
    scores = TRLReward(lambda prompts, completions: value)(BATCH.first(2))
    assert scores[0] == 1.0
    assert scores[1].isnan()


def test_what_it_raises_does_not_tell_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    options = filled({"key": "${MY_KEY}"})

    def odd(prompts: Sequence[str], responses: Sequence[str], key: str) -> Any:
        return [key] * len(responses)

    class NotMade:
        def __init__(self, key: str) -> None:
            raise PermissionError(f"401: {key}")

    for attribute in (odd, NotMade):
        with pytest.raises(InputError, match=r"\$\{MY_KEY\}") as caught:
            PluginReward(attribute, options)(BATCH)
        assert "sk-" not in str(caught.value)


# ---- threads


class KeepsATable:
    """Refuses to work in another thread than the one that made it, as sqlite does."""

    def __init__(self) -> None:
        self.rows, self.thread = 0, threading.get_ident()

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.rows = self._checked() + 1
        return [float(threading.current_thread() is threading.main_thread())] * len(responses)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._checked()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = self._checked() + state["rows"]

    def _checked(self) -> int:
        assert threading.get_ident() == self.thread
        return self.rows


@pytest.mark.parametrize(("limit", "main"), [(None, 1.0), (60.0, 0.0)])
def test_everything_of_it_runs_in_the_main_thread_unless_it_has_a_time_limit(limit: float | None, main: float) -> None:
    reward = PluginReward(KeepsATable, {}, limit)
    assert reward(BATCH).tolist() == [main] * 3
    again = PluginReward(KeepsATable, {}, limit)
    again.load_state_dict(reward.state_dict())
    assert again.state_dict() == {"rows": 1}


def test_a_call_that_takes_too_long_is_given_up_and_the_next_one_works() -> None:
    def slowly(prompts: Sequence[str], responses: Sequence[str]) -> Any:
        yield 1.0  # a generator runs within the limit
        time.sleep(30)

    thread, began = OwnThread(), time.monotonic()
    with pytest.raises(TimeLimitExceeded, match=r"longer than 0\.1 s"):
        thread.call(0.1, lambda: time.sleep(30))
    with pytest.raises(InputError, match=r"took longer than 0\.05 s \(reward\.time_limit\) on 3 responses"):
        PluginReward(slowly, {}, 0.05)(BATCH)
    assert time.monotonic() - began < 5
    assert thread.call(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(5.0, lambda: 1 / 0)


# ---- state


class Holds:
    def __init__(self, value: Any) -> None:
        self.kept = {"kept": [value]}

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [0.0] * len(responses)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


@pytest.mark.parametrize("value", [(1, 2), {1: 2.0}, {3}, object()])
def test_a_state_that_a_file_would_not_give_back_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="state_dict"):
        PluginReward(Holds, {"value": value}).state_dict()


def test_a_state_is_copied_since_the_object_may_change_it() -> None:
    value = {"a": [1, 2.5, None, True, "x", float("nan")]}
    for attribute, options in ((Holds, {"value": value}), (Holds(value), {})):  # a class; an instance of a module
        reward = PluginReward(attribute, options)
        state = reward.state_dict()
        reward._object.kept["kept"].append(1)
        assert repr(state) == repr({"kept": [value]})
        reward.load_state_dict(state)
        reward._object.kept["kept"].append(1)
        assert len(state["kept"]) == 1


def test_the_weights_of_a_torch_module_are_no_state() -> None:
    class Scores(torch.nn.Linear):
        def forward(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            return [0.0] * len(responses)

    assert not PluginReward(Scores, {"in_features": 2, "out_features": 1}).has_state
