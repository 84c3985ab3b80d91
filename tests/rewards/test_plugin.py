from __future__ import annotations

import asyncio
import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.plugins import checked_options
from rlhf_kl.rewards.plugin import OwnThread, PluginReward, TRLReward
from rlhf_kl.types import Prompts, Responses
from tests.made import BATCH, first_of


def problem(reward: Callable[..., Any]) -> str:
    with pytest.raises(InputError) as caught:
        PluginReward(reward)(BATCH)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def returns(value: Any) -> Callable[..., Any]:
    return lambda prompts, responses: value


NAN = float("nan")
NO_NUMBERS = [None, "123", dict.fromkeys(BATCH.texts, 1.0), {1.0, 2.0, 3.0}, frozenset({1.0}), {1.0: 0}.keys()]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *(([1.0, x, 2.0], f"of 'second' is {x!r}, not a finite") for x in (NAN, math.inf, "high", [1.0])),
        ([1.0, 1e300, 2.0], "'second' is 1e+300, beyond"),
        (torch.zeros(3, 2), "not a finite number"),
        ([1.0, 2.0], "returned 2 scores "),
        *((value, f"returned {type(value).__name__}, not one number per response") for value in NO_NUMBERS),
    ],
)
def test_what_is_not_one_finite_number_in_the_place_of_each_response_is_refused(value: Any, words: str) -> None:
    assert words in problem(returns(value))
    if "not one number" in words:
        with pytest.raises(InputError, match=words):
            TRLReward(lambda prompts, completions: value)(BATCH)


@pytest.mark.parametrize(
    ("value", "scores"),
    [
        *((make([1, 2.0, -3.5]), [1.0, 2.0, -3.5]) for make in (list, tuple, torch.tensor, np.array)),
        ((torch.tensor(x) for x in (1, 2.0, -3.5)), [1.0, 2.0, -3.5]),
        ([True, False, None], [1.0, 0.0, NAN]),
        (np.array([True, False, False]), [1.0, 0.0, 0.0]),
        (torch.tensor([True, False, False]), [1.0, 0.0, 0.0]),
        ([100_000_001.0, 1e-30, 1e30], [100_000_001.0, 1e-30, 1e30]),  # digits that float32 lacks
    ],
)
def test_numbers_of_every_make_are_taken_and_none_is_no_score(value: Any, scores: list[float]) -> None:
    found = PluginReward(returns(value))(BATCH)
    assert (found.dtype, found.tolist()) == (torch.float64, pytest.approx(scores, rel=1e-12, nan_ok=True))


@pytest.mark.parametrize(
    "value", [np.array([1.0, np.nan]), [np.True_, np.float32("nan")], torch.tensor([1.0, NAN]), (True, None)]
)
def test_for_trl_true_is_one_and_nan_no_score(value: Any) -> None:
    scores = TRLReward(lambda prompts, completions: value)(first_of(BATCH, 2))
    assert scores.tolist() == pytest.approx([1.0, NAN], nan_ok=True)


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


def test_what_it_returns_does_not_tell_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")

    def odd(prompts: Sequence[str], responses: Sequence[str], key: str) -> Any:
        return [key] * len(responses)

    options, _ = checked_options(odd, {"key": "${MY_KEY}"}, "reward", complete=False)

    with pytest.raises(InputError, match=r"\$\{MY_KEY\}") as caught:
        PluginReward(odd, options)(BATCH)
    assert "sk-" not in str(caught.value)


def emptied(value: Any) -> int:
    """How many things a list or dict held, and those within; now it is empty."""
    inner = list(value.values()) if isinstance(value, dict) else value
    count = len(inner) + sum(emptied(x) for x in inner if isinstance(x, list | dict))
    value.clear()
    return count


COLUMN = {"tests": ["a", {"b": ["c", "d"]}]}


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_function_may_change_all_that_it_gets(limit: float | None) -> None:
    """Columns, of which responses to one prompt share a row; options; what TRL gives; all of them nested."""
    row = copy.deepcopy(COLUMN)
    prompts = Prompts(["p"] * 3, [[1]] * 3, [row] * 3, [(("user", "p"),)] * 3)
    batch = Responses(prompts, ["x", "y", "z"], [[1], [2], [3]])
    options = {"words": {"good": ["a", "b"]}}

    def function(prompts: Any, responses: Any, tests: Any, words: Any) -> list[float]:
        return [float(emptied(row) + (emptied(words) if words else 0)) for row in tests]

    def of_trl(prompts: Any, completions: Any, completion_ids: Any, tests: Any, words: Any) -> list[float]:
        scores = function(prompts, completions, tests, words)
        assert [emptied(given) for given in (prompts, completions, completion_ids)] == [3 + 3 + 3 * 2] * 2 + [3 + 3]
        return scores

    for reward in (PluginReward(function, options, limit), TRLReward(of_trl, options, limit)):
        for _ in range(2):
            assert reward(batch).tolist() == [5.0 + 3.0, 5.0, 5.0]
    assert row == COLUMN
    assert options == {"words": {"good": ["a", "b"]}}
    assert (batch.ids, batch.texts, prompts.messages) == ([[1], [2], [3]], ["x", "y", "z"], [(("user", "p"),)] * 3)


def test_a_value_that_cannot_be_copied_is_given_as_it_is() -> None:
    lock = threading.Lock()
    batch = BATCH._replace(prompts=replace(BATCH.prompts, rows=[{"lock": lock}] * 3))

    def same(prompts: Any, responses: Any, lock: Any) -> list[float]:
        return [float(each is lock[0]) for each in lock]

    assert PluginReward(same)(batch).tolist() == [1.0] * 3


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
    with pytest.raises(InputError, match=r"longer than 0\.1 s"):
        thread.call(0.1, lambda: time.sleep(30))
    with pytest.raises(InputError, match=r"0\.05 s \(reward\.time_limit\)"):
        PluginReward(slowly, {}, 0.05)(BATCH)
    assert time.monotonic() - began < 5
    assert thread.call(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(5.0, lambda: 1 / 0)


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


@pytest.mark.parametrize("interface", [PluginReward, TRLReward])
def test_a_function_that_names_it_reads_the_prompts_as_the_policy_is_asked(interface: Any) -> None:
    seen: list[Any] = []

    def reward(prompts: list[str], rendered: list[str], **columns: Any) -> list[float]:
        seen.append((rendered, columns.get("rendered")))
        return [0.0] * len(prompts)

    def plain(prompts: list[str], responses: list[str], rendered: list[str]) -> list[float]:
        return reward(prompts, rendered)

    chat = replace(BATCH.prompts, rendered=["<p>", "<q>", "<r>"])
    own = replace(chat, rows=[{"rendered": "x"}] * 3)
    for prompts in (BATCH.prompts, chat, own):
        interface(plain if interface is PluginReward else reward)(BATCH._replace(prompts=prompts))
    assert [rendered for rendered, _ in seen] == [["p", "q", "r"], ["<p>", "<q>", "<r>"], ["x"] * 3]


def test_a_function_of_trl_reads_it_only_where_it_names_it() -> None:
    seen: list[Any] = []

    def every(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(columns.get("rendered"))
        return [0.0] * 3

    def optional(prompts: list[str], rendered: Any = None, **_: Any) -> list[float]:
        return every(prompts, rendered=rendered)

    TRLReward(every)(BATCH)
    TRLReward(optional)(BATCH)
    assert seen == [None, ["p", "q", "r"]]


def two(texts: Sequence[str], others: Sequence[str]) -> list[float]:
    """1 where the first has the prompts and the second the responses."""
    return [float(a in BATCH.prompts.texts and b in BATCH.texts) for a, b in zip(texts, others, strict=True)]


class Named:
    def __call__(self, questions: list[str], answers: list[str], **_: Any) -> list[float]:
        return two(questions, answers)


class HalfNamed:
    def __call__(self, texts: list[str], prompts: list[str]) -> list[float]:
        return two(prompts, texts)


@pytest.mark.parametrize(
    "reward",
    [
        lambda responses, prompts=None: two(prompts, responses),
        lambda **texts: two(texts["prompts"], texts["responses"]),
        lambda prompts, responses, /: two(prompts, responses),
        lambda *texts: two(*texts),
        Named,
        HalfNamed,
    ],
)
def test_prompts_and_responses_are_passed_by_name_and_else_by_their_places(reward: Any) -> None:
    assert PluginReward(reward)(BATCH).tolist() == [1.0] * 3


def test_a_column_wins_over_a_default_and_an_option_over_a_column() -> None:
    def most(prompts: list[str], responses: list[str], most: Any = 20.0) -> Any:
        return most if isinstance(most, list) else [most] * len(responses)

    rows = [{"most": 1.0}, {"most": 2.0}, {}]
    batch = BATCH._replace(prompts=replace(BATCH.prompts, rows=rows))
    assert PluginReward(most)(batch).tolist() == [1.0, 2.0, 20.0]
    assert PluginReward(most)(BATCH).tolist() == [20.0] * 3
    assert PluginReward(most, {"most": 5.0})(batch).tolist() == [5.0] * 3
