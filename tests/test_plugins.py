"""Plugins in three moments: the name in the source, the import, the options against the signature."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from rlhf_kl.errors import InputError, nearest
from rlhf_kl.plugins import checked_options, is_reference, load_attribute, look_up, takes, users_code


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problem(call: Any, *arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    [line] = caught.value.problems
    return str(line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine.py:f", True),
        ("a.b:C", True),
        ("C:\\x.py:f", True),
        ("builtin:reviews", False),
        ("adaptive", False),
        (":x", False),
        ("a:", False),
        ("org/model", False),
    ],
)
def test_references_and_names(text: str, expected: bool) -> None:
    assert is_reference(text) is expected


def test_nearest_ignores_case_and_gives_up_on_the_unlike() -> None:
    assert nearest("ADAPTVE", ["adaptive", "fixed"]) == "adaptive"
    assert nearest("zzz", ["adaptive", "fixed"]) is None


# ---- in the source ----


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("class Law: ...\n", "class"),
        ("def Law(prompts, responses): ...\n", "function"),
        ("try:\n    class Law: ...\nexcept ImportError:\n    pass\n", "class"),
        ("from other import Law\n", None),
        ("from other import *\n", None),
        ("import other as Law\n", None),
        ("x = " + "1 + " * 2000 + "1\nclass Law: ...\n", "class"),
        ("Law = make()\n", None),
        ("globals()['Law'] = 3\n", None),
        ("def __getattr__(name): ...\n", None),
        ("def f():\n    global Law\n    Law = 1\n", None),
        ("@wraps\ndef Law(a): ...\n", None),
        ("if x:\n    class Law: ...\nelse:\n    def Law(): ...\n", None),
    ],
)
def test_what_the_source_tells(folder: Path, source: str, kind: str | None) -> None:
    (folder / "mine.py").write_text(source)
    assert look_up("mine.py:Law") == kind


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class Lwa: ...\n", "mine.py has no 'Law'; did you mean Lwa?"),
        ("x = '\\d'\nclass Lwa: ...\n", "did you mean Lwa?"),
        ("class Other:\n    def Law(self): ...\n", "has no 'Law'"),
        ("x = 1\ndef broken(:\n", "is not Python: invalid syntax (line 2)"),
        ("x = '\0'\n", "null bytes"),
        ("x = " + "(" * 5000 + ")" * 5000, "mine.py"),
        ("# coding: nonsense\n", "is not Python: "),
    ],
)
def test_source_that_cannot_be_used_is_one_line(folder: Path, source: str, words: str) -> None:
    (folder / "mine.py").write_text(source)
    assert words in problem(look_up, "mine.py:Law")


@pytest.mark.parametrize("call", [look_up, load_attribute])
@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("other.py:f", "no such file: other.py"),
        ("rlhf_kl_nowhere:Law", "no module 'rlhf_kl_nowhere'"),
        ("json.nowhere:Law", "no module 'json.nowhere'"),
        ("json.decoder:JSONDecodr", "json.decoder has no 'JSONDecodr'; did you mean JSONDecod"),
    ],
)
def test_what_does_not_exist(call: Any, ref: str, words: str) -> None:
    assert words in problem(call, ref)


def test_nothing_of_a_package_runs(folder: Path) -> None:
    """`importlib.util.find_spec("a.b")` would import `a`."""
    package = folder / "rlhf_kl_outer" / "inner"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    (package / "laws.py").write_text("raise SystemExit(3)\nclass Law:\n    def __init__(self, coef): ...\n")
    assert look_up("rlhf_kl_outer.inner.laws:Law") == "class"
    assert "no module 'rlhf_kl_outer.inner.lows'" in problem(look_up, "rlhf_kl_outer.inner.lows:Law")
    assert not (folder / "ran").exists()
    assert not any(name.startswith("rlhf_kl_outer") for name in sys.modules)


def test_modules_of_this_environment() -> None:
    assert look_up("subprocess:getoutput") == "function"
    for without_source in ("math:sqrt", "sys:exit", "_pickle:loads"):
        assert look_up(without_source) is None


# ---- imported ----


def test_a_file_runs_once_until_it_changes_and_leaves_no_trace(folder: Path) -> None:
    file = folder / "mine.py"
    file.write_text("class A: pass\n")
    path_before = list(sys.path)
    assert load_attribute("mine.py:A") is load_attribute(f"{file}:A")
    file.write_text("class A: x = 1\n")
    assert load_attribute("mine.py:A").x == 1
    assert sys.path == path_before
    assert os.listdir(folder) == ["mine.py"]


def test_neighbours_and_modules_of_the_working_directory_can_be_imported(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "rlhf_kl_test_neighbour.py").write_text("X = 7\n")
    (folder / "sub" / "mine.py").write_text("from rlhf_kl_test_neighbour import X\n")
    assert load_attribute("sub/mine.py:X") == 7
    (folder / "rlhf_kl_test_module.py").write_text("def reward(): ...\n")
    assert load_attribute("rlhf_kl_test_module:reward").__name__ == "reward"
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\n\ny = 1 / 0\n", "ZeroDivisionError: division by zero (mine.py:3)"),
        ("x = 1\ndef broken(:\n", "SyntaxError: invalid syntax (mine.py:2)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (mine.py:2)"),
        ("import rlhf_kl_no_such_module\n", "No module named 'rlhf_kl_no_such_module' (mine.py:1)"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines (mine.py:1)"),
        ("import json\n\ndef f():\n    json.loads('')\n\nf()\n", "(mine.py:4)"),
    ],
)
def test_a_file_that_raises_is_one_line_with_its_place(folder: Path, source: str, reason: str) -> None:
    (folder / "mine.py").write_text(source)
    line = problem(load_attribute, "mine.py:f")
    assert line.startswith(f"{folder}/mine.py cannot be imported: ")
    assert line.endswith(reason)
    (folder / "rlhf_kl_test_raises.py").write_text(source)
    assert reason.replace("mine.py", "rlhf_kl_test_raises.py") in problem(load_attribute, "rlhf_kl_test_raises:f")


def test_full_memory_is_no_fault_of_the_users_code() -> None:
    with pytest.raises(MemoryError), users_code("x:"):
        raise MemoryError


# ---- options ----


class Controller:
    """Options with annotations as text, as `from __future__ import annotations` makes them."""

    def __init__(self, *, coef: float, rate: float = 0.5, hold: int | None = 3, name: str | None = None) -> None:
        raise AssertionError("checking options must not build anything")


@dataclass
class Inner:
    words: tuple[int, ...]


@dataclass
class Data:
    words: tuple[int, ...] = ()
    folder: Path = Path()
    shape: Literal["round", "flat"] = "round"
    inner: Inner | None = None
    each: Iterable[int] = ()
    copy: int = 0  # a name of pydantic's own


def anything(prompts, **options):  # type: ignore[no-untyped-def]
    raise AssertionError


def unknown(prompts: list[str], strength: "Missing", other: 3 = None) -> None:  # type: ignore  # noqa: F821, UP037
    raise AssertionError


@pytest.mark.parametrize(
    ("target", "written", "arguments"),
    [
        (Controller, {"coef": 1, "rate": 0.25, "hold": None}, {"coef": 1.0, "rate": 0.25, "hold": None}),
        (anything, {"x": 1, "y": [2]}, {"x": 1, "y": [2]}),
        (unknown, {"strength": 1, "other": "x"}, {"strength": 1, "other": "x"}),
        (functools.partial(Controller, coef=1.0), {"hold": 1}, {"hold": 1}),
        (Data, {"words": [1, 2], "folder": "x", "copy": 1}, {"words": (1, 2), "folder": Path("x"), "copy": 1}),
        (Data, {"inner": {"words": [1]}, "each": [1]}, {"inner": Inner((1,)), "each": [1]}),
    ],
)
def test_a_value_gets_the_type_of_its_annotation(target: Any, written: Any, arguments: Any) -> None:
    assert checked_options(target, written, "c", provided={"prompts"}) == (arguments, [])


@pytest.mark.parametrize(
    ("target", "written", "keys"),
    [
        (Controller, {"coef": "0.1"}, ["coef"]),
        (Controller, {"coef": True}, ["coef"]),
        (Controller, {"coef": float("nan")}, ["coef"]),
        (Controller, {"coef": None}, ["coef"]),
        (Controller, {"coef": 1, "hold": 2.5, "name": 3}, ["hold", "name"]),
        (Controller, {}, ["coef"]),
        (Controller, {"coef": 1, "hold": "${RLHF_KL_NOWHERE}"}, ["hold", "hold"]),
        (Data, {"words": ["a"], "shape": "square", "inner": {"wrds": 1}}, ["words", "shape", "inner"]),
        (Data, {"wrds": [1]}, ["wrds"]),
    ],
)
def test_a_value_that_does_not_fit_is_named(target: Any, written: Any, keys: list[str]) -> None:
    _, problems = checked_options(target, written, "c")
    assert [line.split(":")[0] for line in problems] == [f"c.{key}" for key in keys]


def test_an_unknown_option_names_the_nearest_and_a_missing_one_is_named() -> None:
    assert set(checked_options(Controller, {"rat": 0.5, "beta": 1}, "kl.controller")[1]) == {
        "kl.controller.rat: unknown option of Controller; did you mean kl.controller.rate?",
        "kl.controller.beta: unknown option of Controller; did you mean kl.controller.coef?",
        "kl.controller.coef: missing, Controller needs it",
    }
    assert checked_options(Controller, {}, "c", provided={"coef"}) == ({}, [])
    assert checked_options(Controller, {}, "c", complete=False) == ({}, [])


def test_what_a_call_may_have() -> None:
    assert takes(anything, "whatever")
    assert not takes(Controller, "whatever")
    assert takes(dict, "whatever")  # written in C
