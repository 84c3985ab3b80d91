"""Tests ask for exit codes, keys, files, rows and numbers, so that a sentence can be worded anew without a failure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIMIT = 60
# Calls that compare or hand on what they are given. What other calls get is data: the input of what is tested.
READERS = (
    *("startswith", "endswith", "count", "index", "split", "partition", "removeprefix", "removesuffix", "replace"),
    *("search", "match", "fullmatch", "escape", "raises", "any", "all", "set", "sorted", "approx", "list", "dict"),
)
CODE = ("{", "[", "<", "import ", "def ")


def is_sentence(text: object) -> bool:
    """Four words or more in a row, on one line; a path, a command or a pattern has fewer that stand together."""
    if not isinstance(text, str) or "\n" in text.strip() or text.lstrip().startswith(CODE):
        return False
    return any(len(re.findall(r"(?<![\w./=-])[A-Za-z]{2,}(?![\w/=-])", part)) >= 4 for part in text.split(".*"))


def reads(call: ast.Call) -> bool:
    return (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) in READERS


def compared(node: ast.AST) -> Iterator[ast.Constant | ast.Name]:
    """The constants and names in an assertion that a result is compared with."""
    if isinstance(node, (ast.Constant, ast.Name)):
        yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        children = [node.func] if not reads(node) else [node.func, *node.args]
    for child in children:
        yield from compared(child)


def texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def named(function: ast.FunctionDef) -> dict[str, set[str]]:
    """The texts that a name of a test may stand for: of its tables, and where it is given texts alone."""
    found: dict[str, set[str]] = {}
    for call in (each for each in function.decorator_list if isinstance(each, ast.Call) and len(each.args) == 2):
        names = [each.value for each in ast.walk(call.args[0]) if isinstance(each, ast.Constant)]
        for row in getattr(call.args[1], "elts", []):
            cells = row.elts if len(names) > 1 and isinstance(row, ast.Tuple) else [row]
            for name, cell in zip(names, cells, strict=False):
                found.setdefault(name, set()).update(texts(cell))
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(each.value)):
            for target in (name for name in each.targets if isinstance(name, ast.Name)):
                found.setdefault(target.id, set()).update(texts(each.value))
    return found


def sentences(function: ast.FunctionDef, data: set[str]) -> set[str]:
    """What the assertions of a test and its `match=` ask for, but for texts that it gave itself."""
    known, asked = named(function), set[str]()
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call) and not reads(each)]
    handed = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    for node in ast.walk(function):
        part = node.test if isinstance(node, ast.Assert) else None
        if isinstance(node, ast.keyword) and node.arg == "match":
            part = node.value
        for leaf in compared(part) if part else ():
            if isinstance(leaf, ast.Name):
                asked |= known.get(leaf.id, set()) if leaf.id not in handed else set()
            elif isinstance(leaf.value, str):
                asked.add(leaf.value)
    return {text for text in asked if is_sentence(text) and not any(text in each for each in data)}


def given(tree: ast.Module) -> set[str]:
    """The texts that calls get, outside of assertions and of tables."""
    asserted = {id(leaf) for node in ast.walk(tree) if isinstance(node, ast.Assert) for leaf in compared(node.test)}
    found = set[str]()
    for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
        if getattr(call.func, "attr", "") not in ("parametrize", "skip", "raises"):
            for leaf in (leaf for part in (*call.args, *call.keywords) for leaf in ast.walk(part)):
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str) and id(leaf) not in asserted:
                    found.add(leaf.value)
    return found


def worded(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Each test that asks for a sentence, with what it asks for."""
    for file in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        data = given(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (found := sentences(node, data)):
                yield f"{file.relative_to(folder)}::{node.name}", found


@pytest.mark.slow
def test_few_tests_ask_for_a_sentence() -> None:
    found = dict(worded(TESTS))
    assert len(found) <= LIMIT, "\n".join(f"{name}: {sorted(texts)}" for name, texts in found.items())


def test_what_is_a_sentence_of_the_program_and_what_is_data(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("""
def test_one():
    assert "the model has no head" in problem(load, "a model that has no head")

@pytest.mark.parametrize(("given", "told"), [(1, "one is less than two")])
def test_two(given, told):
    assert told in problem(load, given)

def test_three():
    with pytest.raises(InputError, match="a key of the config is missing"):
        load()

def test_data():
    text = "the room was not clean"
    assert decode(encode(text)) == text
    assert gold("the food was very good") > gold("the food was not good")
    assert "policy.model: no such" in problem(load)
""")
    assert [name.partition("::test_")[2] for name, _ in worded(tmp_path)] == ["one", "two", "three"]
