from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.plugins import filled
from rlhf_kl.rewards.functions import WeightedSum, checked_scores
from rlhf_kl.rewards.plugin import PluginReward, scorers_with_state, state_kept, states_of

PROMPTS, RESPONSES = ["p", "q"], ["first", "second"]


class Counts:
    """Every score is the number of responses seen before it."""

    def __init__(self, start: Any = 0) -> None:
        self.seen = start

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.seen += len(responses)
        return [float(self.seen - len(responses) + i) for i in range(len(responses))]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Holds(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": [{"value": self.seen}]}


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
    assert checked_scores(reward, PROMPTS, RESPONSES, "x").tolist() == [main, main]
    again = PluginReward(KeepsATable, {}, limit)
    again.load_state_dict(reward.state_dict())
    assert again.state_dict() == {"rows": 1}


def test_objects_with_a_state_are_found_wherever_they_score() -> None:
    def plain(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [0.0] * len(responses)

    one, two, gold = (PluginReward(Counts, {"start": n}) for n in (10, 20, 30))
    terms = WeightedSum({"a": (1.0, one), "b": (0.5, two), "c": (1.0, PluginReward(plain, {}))})
    assert scorers_with_state(terms, gold) == {"terms.a": one, "terms.b": two, "gold": gold}
    assert scorers_with_state(one, plain) == {"reward": one}
    assert scorers_with_state(PluginReward(plain, {}), None) == {}


def test_an_evaluation_leaves_the_state_as_it_was() -> None:
    reward = PluginReward(Counts, {})
    reward(PROMPTS, RESPONSES)
    with state_kept({"reward": reward}):
        assert reward(PROMPTS, RESPONSES) == [2.0, 3.0]
    assert reward(PROMPTS, RESPONSES) == [2.0, 3.0]


@pytest.mark.parametrize("value", [(1, 2), {1: 2.0}, {3}, b"x", object(), [[1j]]])
def test_a_state_that_a_file_would_not_give_back_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"reward Holds: state_dict\(\)\['kept'\]\[0\]\['value'\]") as caught:
        PluginReward(Holds, {"start": value}).state_dict()
    assert len(caught.value.problems) == 1
    assert PluginReward(Holds, {"start": {"a": [1, 2.5, None, True, "x"]}}).state_dict()


def test_what_it_raises_does_not_tell_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    options = filled({"key": "${MY_KEY}"})

    def refused(prompts: Sequence[str], responses: Sequence[str], key: str) -> list[float]:
        raise PermissionError(f"401: {key}")

    def odd(prompts: Sequence[str], responses: Sequence[str], key: str) -> Any:
        return [key] * len(responses)

    class NotMade:
        def __init__(self, key: str) -> None:
            raise PermissionError(f"401: {key}")

    for function in (refused, odd):
        reward = PluginReward(function, options)
        with pytest.raises(InputError, match=r"\$\{MY_KEY\}") as caught:
            checked_scores(reward, PROMPTS, RESPONSES, "x")
        assert "sk-" not in str(caught.value)
    with pytest.raises(InputError, match=r"cannot be created: raised PermissionError: 401: \$\{MY_KEY\}"):
        PluginReward(NotMade, options)


class Live(Counts):
    """Its state is the mapping that it goes on to change."""

    def __init__(self) -> None:
        self.kept = {"seen": [0]}

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        self.kept["seen"][0] += len(responses)
        return [float(self.kept["seen"][0])] * len(responses)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


@pytest.mark.parametrize("made", [Live, Live()])  # a class, and an instance in the user's module
def test_a_state_that_goes_on_changing_is_copied(made: Any) -> None:
    reward = PluginReward(made, {})
    assert reward.has_state
    with state_kept({"reward": reward}):
        reward(PROMPTS, RESPONSES)
        first = reward.state_dict()
        reward(PROMPTS, RESPONSES)
        assert first == {"seen": [2]}
    assert reward.state_dict() == {"seen": [0]}
    assert reward(PROMPTS, RESPONSES) == [2.0, 2.0]


def test_the_weights_of_a_torch_module_are_no_state() -> None:
    class Scores(torch.nn.Linear):
        def forward(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            return [0.0] * len(responses)

    assert not PluginReward(Scores, {"in_features": 2, "out_features": 1}).has_state


class Fails(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no disk")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no disk")


def test_a_state_that_fails_is_told_and_costs_gold_nothing() -> None:
    reward = PluginReward(Fails, {})
    for attempt in (reward.state_dict, lambda: reward.load_state_dict({})):
        with pytest.raises(InputError, match=r"reward Fails: .*state_dict raised ValueError: no disk"):
            attempt()
    with pytest.raises(InputError):
        states_of({"reward": reward})
    counts = PluginReward(Counts, {})
    with state_kept({"gold": reward, "reward": counts}):
        assert states_of({"gold": reward, "reward": counts}) == {"reward": {"seen": 0}}
