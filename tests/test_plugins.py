"""Plugins in three moments: the name in the source, the import, the options against the signature."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from rlhf_kl.errors import nearest
from rlhf_kl.plugins import (
    checked_options,
    filled,
    home_of,
    is_reference,
    load_attribute,
    look_up,
    takes,
    users_code,
)
from rlhf_kl.rewards.plugin import OwnThread
from tests.made import problem


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_references_and_names() -> None:
    texts = ["mine.py:f", "a.b:C", "C:\\x.py:f", "builtin:reviews", "adaptive", ":x", "a:", "org/model"]
    assert [text for text in texts if is_reference(text)] == texts[:3]
    assert nearest("ADAPTVE", ["adaptive", "fixed"]) == "adaptive"
    assert nearest("lr", ["rollout", "learning_rate"]) == "learning_rate"
    assert nearest("zzz", ["adaptive", "fixed"]) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("try:\n    class Law: ...\nexcept ImportError:\n    pass\n", None),
        ("from other import *\n", None),
        ("Law = make()\n", None),
        ("def __getattr__(name): ...\n", None),
        ("class Lwa: ...\n", "mean Lwa?"),
        ("x = 1\ndef broken(:\n", "(mine.py, line 2)"),
    ],
)
def test_what_the_source_tells(folder: Path, source: str, words: str | None) -> None:
    (folder / "mine.py").write_text(source)
    if words is None:
        look_up("mine.py:Law")
    else:
        assert words in problem(look_up, "mine.py:Law")


@pytest.mark.parametrize("call", [look_up, load_attribute])
def test_modules(call: Any) -> None:
    assert ": other.py" in problem(call, "other.py:f")
    assert "'rlhf_kl_nowhere'" in problem(call, "rlhf_kl_nowhere:Law")
    assert "mean getoutput?" in problem(call, "subprocess:getoutputs")
    call("json.decoder:JSONDecoder")
    call("math:sqrt")  # without a source


def test_nothing_of_a_package_runs(folder: Path) -> None:
    (folder / "rlhf_kl_outer").mkdir()
    (folder / "rlhf_kl_outer" / "__init__.py").write_text("raise SystemExit(3)\nclass Law: ...\n")
    look_up("rlhf_kl_outer:Law")
    look_up("rlhf_kl_outer.inner.laws:Other")
    assert "SystemExit: 3" in problem(load_attribute, "rlhf_kl_outer.inner.laws:Law")


def test_a_file_runs_once_until_it_changes_and_leaves_nothing_but_its_folder(folder: Path) -> None:
    file = folder / "mine.py"
    file.write_text("class A: pass\n")
    path_before = list(sys.path)  # modules of libraries are found before those of a user's
    assert load_attribute("mine.py:A") is load_attribute(f"{file}:A")
    file.write_text("class A: x = 1\n")
    assert load_attribute("mine.py:A").x == 1
    assert sys.path == [*path_before, str(folder)]
    assert os.listdir(folder) == ["mine.py"]


def test_modules_of_the_working_directory_can_be_imported(folder: Path) -> None:
    (folder / "rlhf_kl_test_module.py").write_text("def reward(): ...\n")
    assert load_attribute("rlhf_kl_test_module:reward").__name__ == "reward"


LATE = """
from rlhf_kl_near import X
import sys
if {adds!r}: sys.path.insert(0, {adds!r})

def now(): return X

def late():
    from rlhf_kl_{name} import X
    return X

class Later:
    async def __call__(self): return late()
"""


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("name", ["late", "here", "added"])
def test_a_neighbour_is_found_whenever_it_is_imported(folder: Path, name: str, thread: bool) -> None:
    """Of the file's folder, of the working directory, and of a folder that the file itself puts on the path."""
    places = {"near": folder / "sub", "late": folder / "sub", "here": folder, "added": folder / "elsewhere"}
    for module, place in places.items():
        place.mkdir(exist_ok=True)
        (place / f"rlhf_kl_{module}.py").write_text(f"X = {module!r}\n")
    (folder / "sub" / "mine.py").write_text(LATE.format(name=name, adds=str(folder / "elsewhere")))
    own_thread = OwnThread()
    for attribute in ("now", "late", "Later"):
        target = load_attribute(f"sub/mine.py:{attribute}")
        call = (lambda called: lambda: asyncio.run(called()))(target()) if attribute == "Later" else target
        sys.modules.pop(f"rlhf_kl_{name}", None)
        with users_code("raised", home_of(target)):
            assert (own_thread.call(9.0, call) if thread else call()) == ("near" if attribute == "now" else name)
    sys.modules.pop("rlhf_kl_near")


def test_a_neighbour_shadows_no_library_of_the_program(folder: Path) -> None:
    (folder / "colorsys.py").write_text("WHOSE = 'mine'\n")
    (folder / "mine.py").write_text("def late():\n    import colorsys\n    return colorsys.WHOSE\n")
    target = load_attribute("mine.py:late")
    sys.modules.pop("colorsys", None)
    assert not hasattr(importlib.import_module("colorsys"), "WHOSE")
    sys.modules.pop("colorsys")
    with users_code("raised", home_of(target)):
        assert target() == "mine"  # as where the file is run by itself
    sys.modules.pop("colorsys")


@pytest.mark.parametrize("name", ["random", "types", "datasets", "torch", "__main__"])
@pytest.mark.parametrize("call", [look_up, load_attribute])
def test_a_file_with_the_name_of_a_library_is_refused(folder: Path, name: str, call: Any) -> None:
    (folder / f"{name}.py").write_text("raise SystemExit(3)\ndef f(): ...\n")
    before = sys.modules.get(name)
    assert f"such as my_{name}.py" in problem(call, f"{name}.py:f")
    assert sys.modules.get(name) is before


SPAWNS = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
X = 0

@dataclass
class Text:
    words: str

def one(text): return f"{X} {text.words}"

def f(texts, method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        found = pool.map(one, map(Text, texts))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return found + list(pool.map(one, map(Text, texts)))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_a_file_starts_find_it_by_its_name(folder: Path, method: str) -> None:
    """Also one of two files of the same name."""
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(SPAWNS.replace("X = 0", f"X = {name!r}"))
    targets = {name: load_attribute(f"{name}/mine.py:f") for name in "ab"}
    for name, target in targets.items():
        with users_code("raised", home_of(target)):
            assert target(["x", "y"], method) == [f"{name} x", f"{name} y"] * 2


def test_modules_of_one_name_stay_apart(folder: Path) -> None:
    """Two files, a changed file, and a module that the user's own session has imported."""
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "twins.py").write_text(f"def f(): return {name!r}\n")
    (folder / "twins.py").write_text("def f(): return 'module'\n")
    first, second, module = (load_attribute(ref) for ref in ("a/twins.py:f", "b/twins.py:f", "twins:f"))
    assert (first(), second(), module()) == ("a", "b", "module")
    imported = sys.modules["twins"]
    assert imported.f is module
    (folder / "a" / "twins.py").write_text("def f(): return 'changed'\n")
    changed = load_attribute("a/twins.py:f")
    for target in (first, second, changed, module):
        with users_code("raised", home_of(target)):
            assert sys.modules["twins"].f is target
        assert sys.modules["twins"] is imported
    del sys.modules["twins"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\n\ny = 1 / 0\n", ": division by zero (mine.py:3)"),
        ("x = 1\ndef broken(:\n", " (mine.py, line 2)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (mine.py:2)"),
    ],
)
def test_a_file_that_raises_is_one_line_with_its_place(folder: Path, source: str, reason: str) -> None:
    (folder / "mine.py").write_text(source)
    line = problem(load_attribute, "mine.py:f")
    assert line.startswith(f"{folder}/mine.py ")
    assert line.endswith(reason)
    with pytest.raises(MemoryError), users_code("x:"):  # full memory is no fault of the user's code
        raise MemoryError


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Bearer ${MY_KEY}, ${SHORT}", "Bearer sk-123456, ab"),
        ("$${MY_KEY}", "${MY_KEY}"),
        ("$$${MY_KEY}", "$${MY_KEY}"),
        ("a $${ b", "a ${ b"),
        ("$5 and {x} and $MY_KEY", "$5 and {x} and $MY_KEY"),
        (["${SHORT}", 3, {"k": "${MY_KEY}"}], ["ab", 3, {"k": "sk-123456"}]),
    ],
)
def test_variables_are_filled_in_and_no_message_tells_them(
    written: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    monkeypatch.setenv("LONGER", "sk-123456-7")
    monkeypatch.setenv("SHORT", "ab")  # too short to be a secret: it would be found in every text
    assert filled({"x": written, "y": "${LONGER}${MY_KEY}"})["x"] == value


def test_no_message_about_its_code_tells_what_a_variable_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    monkeypatch.setenv("LONGER", "sk-123456-7")
    monkeypatch.setenv("SHORT", "ab")
    (folder / "mine.py").write_text("def f(**options): raise KeyError(str(options))\n")
    target = load_attribute("mine.py:f")
    options, _ = checked_options(target, {"a": ["${LONGER}"], "b": {"c": "x ${MY_KEY}"}, "d": "${SHORT}"}, "reward")
    monkeypatch.delenv("MY_KEY")  # what its options hold is still hidden
    line = problem(lambda: call_of_users(target, options))
    assert "sk-1" not in line
    assert all(part in line for part in ("${LONGER}", "x ${MY_KEY}", "'ab'"))


def call_of_users(target: Any, options: dict[str, Any]) -> None:
    with users_code("raised", home_of(target)):
        target(**options)


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
        (Controller, {"coef": 1, "hold": 2.5, "name": 3}, ["hold", "name"]),
        (Controller, {"coef": 1, "hold": "${RLHF_KL_NOWHERE}"}, ["hold", "hold"]),
        (anything, {"b": {"c": ["$${RLHF_KL_NOWHERE}", "${RLHF_KL_NOWHERE}"]}}, ["b.c", "prompts"]),
        (Data, {"words": ["a"], "shape": "square", "inner": {"wrds": 1}}, ["words", "shape", "inner"]),
        (Data, {"wrds": [1]}, ["wrds"]),
    ],
)
def test_a_value_that_does_not_fit_is_named(target: Any, written: Any, keys: list[str]) -> None:
    _, problems = checked_options(target, written, "c")
    assert [line.split(":")[0] for line in problems] == [f"c.{key}" for key in keys]


def test_what_the_program_provides_is_not_missing_and_a_familiar_name_is_told() -> None:
    unknown, _ = sorted(checked_options(Controller, {"beta": 1}, "kl.controller")[1])
    assert unknown.startswith("kl.controller.beta: ")
    assert unknown.endswith("mean kl.controller.coef?")
    assert checked_options(Controller, {}, "c", provided={"coef"}) == ({}, [])
    assert checked_options(Controller, {}, "c", complete=False) == ({}, [])
    assert [takes(target, "whatever") for target in (anything, Controller, dict)] == [True, False, True]
