"""What source says of a plugin, against what the imported object says."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.components import load_attribute
from rlhf_kl.config.definitions import definition_of
from rlhf_kl.config.source import read_definition
from rlhf_kl.errors import InputError

SOURCE = """
from dataclasses import dataclass
import functools

def plain(prompts, responses, words=20, *, slope: float, **rest): ...
def by_place(prompts, responses, /, words=3): ...
async def later(prompts): ...

class Law:
    def __init__(self, coef, episodes: int = 5, *, rate=0.5):
        self.coef = coef
    def update(self, kl, episodes): ...

class Child(Law):
    limit = 3

class Own(Child):
    def __init__(self, *, gain): ...

class Empty:
    pass

@dataclass
class Fields:
    coef: float
    episodes: int = 5
    def update(self, kl, episodes): ...

if True:
    class Guarded:
        def __init__(self, coef): ...
"""
HERE = [Path("/")]
NAMES = ["plain", "by_place", "Law", "Child", "Own", "Empty", "Fields", "Guarded"]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(source)
        return f"{tmp_path}/mine.py"

    return write


def shape(parameters: Any) -> list[tuple[str, bool, bool]]:
    """Name, whether it can be written in a config, and whether it must be."""
    kinds = inspect.Parameter
    return sorted(
        (p.name, p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY), p.default is p.empty)
        for p in parameters
        if p.kind is not kinds.VAR_POSITIONAL
    )


@pytest.mark.parametrize("name", NAMES)
def test_source_and_object_agree(file: Callable[[str], str], name: str) -> None:
    ref = f"{file(SOURCE)}:{name}"
    read, loaded = read_definition(ref, HERE), definition_of(load_attribute(ref, search=HERE))
    assert (read.name, read.kind) == (loaded.name, loaded.kind)
    assert read.parameters is not None
    assert loaded.parameters is not None
    assert shape(read.parameters) == shape(loaded.parameters)
    for member in ("coef", "update", "limit", "__call__"):
        assert read.lacks(member) == loaded.lacks(member)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("from other import Law\n", "nothing"),
        ("from other import *\n", "nothing"),
        ("Law = make()\n", "nothing"),
        ("globals()['Law'] = 3\n", "nothing"),
        ("def __getattr__(name): ...\n", "nothing"),
        ("def f():\n    global Law\n    Law = 1\n", "nothing"),
        ("@wraps\ndef Law(a): ...\n", "nothing"),
        ("if x:\n    class Law: ...\nelse:\n    class Law: ...\n", "nothing"),
        ("class Law(base.Law):\n    def __init__(self, coef): ...\n", "parameters"),
        ("class Law(Other): ...\n", "its kind"),
        ("@register\nclass Law:\n    def __init__(self, coef): ...\n", "its kind"),
        ("class Law(metaclass=Meta):\n    def update(self): ...\n", "its kind"),
        ("class Law:\n    def __new__(cls, coef): ...\n    def __init__(self): ...\n", "its kind"),
    ],
)
def test_what_source_cannot_tell_is_not_known_and_no_problem(
    file: Callable[[str], str], source: str, what: str
) -> None:
    read = read_definition(f"{file(source)}:Law", HERE)
    assert read.kind == (None if what == "nothing" else "class")
    assert (read.parameters is None) == (what != "parameters")
    if "__new__" not in source:
        assert not read.lacks("coef")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("class Lwa: ...\n", "has no 'Law'; did you mean Lwa?"),
        ("x = 1\ndef broken(:\n", "is not Python: invalid syntax (line 2)"),
        ("x = '\\d'\nclass Lwa: ...\n", "did you mean Lwa?"),
        ("x = '\0'\n", "is not Python: source code string cannot contain null bytes"),
        ("x = " + "(" * 5000 + ")" * 5000, "is not Python: "),
        ("# coding: nonsense\n", "is not Python: "),
    ],
)
def test_source_that_cannot_be_used_is_one_line(file: Callable[[str], str], source: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        read_definition(f"{file(source)}:Law", HERE)
    assert line in str(caught.value)
    assert len(caught.value.problems) == 1


def test_nothing_of_a_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`importlib.util.find_spec("a.b")` would import `a`."""
    package = tmp_path / "rlhf_kl_outer" / "inner"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (package / "laws.py").write_text("raise SystemExit(3)\nclass Law:\n    def __init__(self, coef): ...\n")
    monkeypatch.chdir(tmp_path)
    read = read_definition("rlhf_kl_outer.inner.laws:Law", HERE)
    assert [p.name for p in read.parameters or []] == ["coef"]
    with pytest.raises(InputError, match=r"no module 'rlhf_kl_outer\.inner\.lows'"):
        read_definition("rlhf_kl_outer.inner.lows:Law", HERE)
    with pytest.raises(InputError, match="no module 'rlhf_kl_nowhere'"):
        read_definition("rlhf_kl_nowhere:Law", HERE)
    assert not (tmp_path / "ran").exists()
    assert not any(name.startswith("rlhf_kl_outer") for name in sys.modules)


def test_modules_of_this_environment() -> None:
    assert read_definition("subprocess:getoutput", HERE).kind == "function"
    assert read_definition("json.decoder:JSONDecoder", HERE).takes("strict")
    for without_source in ("math:sqrt", "sys:exit", "_pickle:loads"):
        assert read_definition(without_source, HERE).kind is None
