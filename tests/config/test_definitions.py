"""Options against the signature of an imported object."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.definitions import definition_of, option_problems


class Controller:
    """Options with annotations as text, as `from __future__ import annotations` makes them."""

    def __init__(self, *, coef: float, rate: float = 0.5, hold: int = 3, name: str | None = None) -> None:
        raise AssertionError("checking options must not build anything")


@dataclass
class Data:
    words: tuple[int, ...]
    folder: Path = Path()


def takes_anything(prompts, **options):  # type: ignore[no-untyped-def]
    raise AssertionError


def unknown_annotation(prompts: list[str], strength: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
    raise AssertionError


def check_options(obj: Any, options: Mapping[str, Any], *, provided: set[str], where: str) -> list[str]:
    return option_problems(definition_of(obj), options, provided=provided, where=where)


def test_options_that_fit_are_no_problem() -> None:
    options = {"coef": 1, "rate": 0.25, "hold": 2, "name": None}
    assert check_options(Controller, options, provided=set(), where="c") == []
    assert check_options(Controller, {}, provided={"coef"}, where="c") == []
    assert check_options(takes_anything, {"x": 1, "y": [2]}, provided={"prompts"}, where="c") == []
    assert check_options(unknown_annotation, {"strength": 1}, provided={"prompts"}, where="c") == []
    assert check_options(functools.partial(Controller, coef=1.0), {"hold": 1}, provided=set(), where="c") == []


def test_a_list_of_yaml_is_good_for_a_tuple_and_a_text_for_a_path() -> None:
    assert check_options(Data, {"words": [1, 2], "folder": "x"}, provided=set(), where="c") == []
    [problem] = check_options(Data, {"words": ["a"]}, provided=set(), where="c")
    assert problem.startswith("c.words")


def test_an_unknown_option_names_the_nearest_and_a_missing_one_is_named() -> None:
    problems = check_options(Controller, {"rat": 0.5}, provided=set(), where="kl.controller")
    assert problems == [
        "kl.controller.rat: unknown option of Controller; did you mean kl.controller.rate?",
        "kl.controller.coef: missing, Controller needs it",
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("coef", "0.1"),
        ("coef", True),
        ("coef", float("nan")),
        ("coef", None),
        ("hold", 2.5),
        ("hold", [1]),
        ("name", 3),
    ],
)
def test_a_value_of_the_wrong_type_is_a_problem(option: str, value: object) -> None:
    problems = check_options(Controller, {"coef": 1.0, option: value}, provided=set(), where="c")
    assert len(problems) == 1
    assert problems[0].startswith(f"c.{option}: ")


def test_what_an_object_is() -> None:
    assert definition_of(3).kind == "value"
    assert definition_of(takes_anything).kind == "function"
    assert definition_of(Data).kind == "class"
    assert definition_of(takes_anything).takes("whatever")
    assert definition_of(Controller).takes("whatever") is False


class Writes:
    def __init__(self) -> None:
        self.coef = 1.0


class Inherits(Writes):
    def update(self) -> None:
        pass


class Makes:
    def __init__(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self, name, value)


@dataclass
class Field:
    coef: float


@pytest.mark.parametrize(
    ("cls", "coef", "update"),
    [(Writes, False, True), (Inherits, False, False), (Makes, False, False), (Field, False, True), (dict, True, False)],
)
def test_what_instances_are_known_to_lack(cls: type, coef: bool, update: bool) -> None:
    definition = definition_of(cls)
    assert (definition.lacks("coef"), definition.lacks("update")) == (coef, update)
