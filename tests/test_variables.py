from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_kl.variables import (
    change_texts,
    filled,
    hidden,
    missing_variables,
    restored,
    secrets_of,
    variable_problems,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    monkeypatch.setenv("SHORT", "ab")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOWHERE", raising=False)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${MY_KEY}", "sk-123456"),
        ("Bearer ${MY_KEY}, ${SHORT}", "Bearer sk-123456, ab"),
        ("$${MY_KEY}", "${MY_KEY}"),
        ("$$${MY_KEY}", "$${MY_KEY}"),
        ("a $${ b", "a ${ b"),
        ("$5 and {x} and $MY_KEY", "$5 and {x} and $MY_KEY"),
        (["${SHORT}", 3, {"k": "${MY_KEY}"}], ["ab", 3, {"k": "sk-123456"}]),
        (None, None),
    ],
)
def test_variables_are_filled_in(written: Any, value: Any) -> None:
    assert filled({"x": written}) == {"x": value}


def test_a_variable_that_is_not_set_is_named() -> None:
    assert missing_variables({"a": "${NOWHERE}", "b": {"c": ["${EMPTY}"]}}, "reward") == [
        "reward.a: the environment variable NOWHERE is not set",
        "reward.b.c: the environment variable EMPTY is not set",
    ]
    assert missing_variables({"a": "$${NOWHERE}"}, "reward") == []


@pytest.mark.parametrize("text", ["${}", "a ${", "${2x}", "${MY-KEY}"])
def test_a_broken_variable_is_a_problem(text: str) -> None:
    [problem] = variable_problems({"a": text}, "reward")
    assert problem.startswith("reward.a: ")
    assert "$${" in problem


@pytest.mark.parametrize("name", ["api_key", "openai_api_key", "token", "HF_TOKEN", "client_secret", "password"])
def test_a_secret_that_is_written_out_is_refused(name: str) -> None:
    for options in ({name: "sk-123456"}, {"login": {name: "sk-123456"}}, {"logins": [{name: "$${MY_KEY}"}]}):
        [problem] = variable_problems(options, "reward")
        assert f".{name}: " in problem
        assert "${NAME}" in problem
        assert "sk-" not in problem
    assert bool(variable_problems({name: 12345678}, "reward")) != name.lower().endswith("token")  # as in max_token: 5
    for fine in ("${MY_KEY}", "key ${MY_KEY}", "", None, True):
        assert variable_problems({name: fine}, "reward") == []


def test_other_options_may_be_any_text() -> None:
    assert variable_problems({"tokens": "a", "key": "b", "max_token_count": "c", "url": "$5"}, "reward") == []


def test_messages_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGER", "sk-123456-7")
    secrets = secrets_of({"a": "${MY_KEY}", "b": ["${LONGER}", "${SHORT}", "$${MY_KEY}", "${NOWHERE}"]})
    assert hidden("401: sk-123456-7 about sk-123456", secrets) == "401: ${LONGER} about ${MY_KEY}"
    assert "ab" not in secrets  # too short: it would be found in every text


def test_a_file_holds_names_and_only_those_of_the_config_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = secrets_of({"a": "Bearer ${MY_KEY}"})
    state = {"key": "sk-123456", "calls": [3, "to sk-123456", None], "other": "${HOME}"}
    stored = change_texts(state, lambda text: hidden(text, secrets))
    assert "sk-" not in json.dumps(stored)
    assert change_texts(stored, lambda text: restored(text, secrets)) == state
