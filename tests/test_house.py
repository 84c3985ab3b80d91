"""The shape of the package: each limit is one that a reader feels. To raise one, say in the commit what it buys."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf_kl
from tests.made import Make
from tests.ppo.conftest import make_trainer  # noqa: F401

PACKAGE = Path(rlhf_kl.__file__).parent
MOST_LINES = 350  # of a file
MOST_LINES_OF_FUNCTION = 50  # below its signature, which lists the options of a command
MOST_MODULES = 48  # of this package that the step of PPO pulls in
MOST_FRAMES = 9  # of this package, from an update to the log-softmax of a training pass
STORED = Path(__file__).with_name("house_lines.txt")  # most lines of the package, a round number
MOST_TYPES = 12  # on a prompt's way
MOST_CONSTANTS = 40  # by which the KL is moved and judged
NO_CONTROL = {"guard.py", "plant.py", "tilt.py"}  # arguments to try; a simulated policy; what a KL can buy
NO_BATCHES = {"ReservedLayer"}  # keys and values of a model
CHANGING = {  # methods that change a list, a set or a mapping
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault"),
    *("sort", "update"),
}
CACHES = {  # what was computed or loaded once, as in `sys.modules`; none of it decides a result
    "data/chat.py: _ROLES",
    "plugins.py: _HOMES",
    "plugins.py: _LOADED",
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


# ---- names and sizes


def test_no_file_name_comes_twice() -> None:
    names = Counter(file.name for file in files() if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_long() -> None:
    lines = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_function_is_long() -> None:
    sizes = {}
    for file in files():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes[f"{name_of(file)}: {node.name}"] = (node.end_lineno or 0) - node.body[0].lineno + 1
    assert {name: count for name, count in sizes.items() if count > MOST_LINES_OF_FUNCTION} == {}


def test_control_has_few_constants() -> None:
    """Each is a number, or a few that belong together, under a name of its own at the top of a file."""
    found = []
    for file in sorted((PACKAGE / "control").glob("*.py")):
        for node in tree_of(file).body:
            names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            numbers = {type(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)} <= {int, float}
            if (
                names
                and names[0].isupper()
                and numbers
                and file.name not in NO_CONTROL
                and "set(" not in ast.unparse(node)
            ):
                found += [f"{file.name}: {name}" for name in names]
    assert len(found) <= MOST_CONSTANTS, found
    assert "adaptive.py: CALM" in found


# ---- what is pulled in


def file_of(module: str) -> Path | None:
    """The file of a module of this package, or of a package in it."""
    place = PACKAGE.parent.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def imported(tree: ast.AST) -> Iterator[str]:
    """Own modules that a file imports, also inside of functions; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE.name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if file_of(inside) is not None else str(node.module)
        yield from imported(node)


def closure(module: str) -> set[str]:
    """A module with all that it pulls in, packages included where their `__init__.py` holds code."""
    found, left = set[str](), [module]
    while left:
        name = left.pop()
        file = file_of(name)
        if name in found or file is None:
            continue
        found.add(name)
        left += [name.rpartition(".")[0], *imported(tree_of(file))]
    return {name for name in found if any(not isinstance(each, ast.Expr) for each in body_of(name))}


def body_of(module: str) -> list[ast.stmt]:
    file = file_of(module)
    return [] if file is None else tree_of(file).body


def test_the_step_of_ppo_pulls_in_little() -> None:
    modules = closure("rlhf_kl.ppo.step")
    assert len(modules) <= MOST_MODULES, sorted(modules)
    assert not [name for name in modules if name.startswith("rlhf_kl.config")]


def test_what_is_trained_on_is_given_values() -> None:
    """Not the config's tree: sections and settings come as values."""
    known = {
        name_of(file): [name for name in imported(tree_of(file)) if name.startswith("rlhf_kl.config")]
        for folder in ("ops", "ppo", "data", "rewards")
        for file in (PACKAGE / folder).glob("*.py")
    }
    assert {file: names for file, names in known.items() if names} == {}


# ---- frames


def test_few_calls_lie_between_an_update_and_the_softmax(make_trainer: Make) -> None:  # noqa: F811
    """Counted in training passes: one whose loss has the exact KL, and one without."""
    depths: list[list[str]] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") == "log_softmax":
            names = []
            while frame is not None and (not names or names[-1] != "update"):
                if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                    names.append(frame.f_code.co_name)
                frame = frame.f_back
            if "backward" in names:
                depths.append(names)

    for placement, estimator in (("loss", "exact"), ("reward", "k1")):
        trainer = make_trainer(kl={"placement": placement, "estimator": estimator})
        depths.clear()
        sys.setprofile(note)
        try:
            trainer.update(1)
        finally:
            sys.setprofile(None)
        assert depths
        assert max(map(len, depths)) <= MOST_FRAMES, max(depths, key=len)


# ---- types


def holds_rows(x: Any) -> bool:
    """Whether an object of this package holds tensors, texts or tokens of rows; what holds a model is none."""
    if not type(x).__module__.startswith(PACKAGE.name) or isinstance(x, torch.nn.Module):
        return False
    values = list(x if isinstance(x, tuple) else getattr(x, "__dict__", {}).values())
    return not any(isinstance(value, torch.nn.Module) for value in values) and any(
        (isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0)
        or (isinstance(value, list) and bool(value) and isinstance(value[0], str | list))
        for value in values
    )


def test_a_prompt_passes_few_types(make_trainer: Make) -> None:  # noqa: F811
    """From the data to the loss: those that are read from a file, and those of an update."""
    found = {"PromptRow", "PromptStream", "Loss"}

    def note(frame: Any, event: str, value: Any) -> None:
        if event == "return" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            found.update(type(x).__name__ for x in (value, *frame.f_locals.values()) if holds_rows(x))

    trainer = make_trainer()
    sys.setprofile(note)
    try:
        trainer.update(1)
    finally:
        sys.setprofile(None)
    assert {"Prompts", "RolloutBatch"} < found
    assert len(found - NO_BATCHES) <= MOST_TYPES, " ".join(sorted(found))


# ---- hidden state


def changed_globals(tree: ast.Module) -> Iterator[str]:
    """Names at the top of a file that code in a function changes."""
    targets = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    top = {
        name.id
        for node in targets
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            yield from node.names
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in top:
            yield changed.id


def test_code_changes_no_module_global() -> None:
    found = {f"{name_of(file)}: {name}" for file in files() for name in changed_globals(tree_of(file))}
    assert found - CACHES == set()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("X = {}\ndef f():\n    X['a'] = 1", ["X"]),
        ("X = []\ndef f():\n    X.append(1)", ["X"]),
        ("X = 1\ndef f():\n    global X\n    X = 2", ["X"]),
        ("X = {}\nX['a'] = 1\ndef f():\n    return X['a']", []),
    ],
)
def test_a_global_that_changes_is_found(code: str, names: list[str]) -> None:
    assert list(changed_globals(ast.parse(code))) == names


# ---- inflow


def package_lines() -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files())


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(STORED.parent), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def test_new_lines_are_named() -> None:
    """A round number, so that no line is saved for its sake."""
    assert package_lines() <= int(STORED.read_text()), (
        f"raise {STORED.name} by 500, in a commit whose message says what the lines buy"
    )


def test_a_commit_that_raises_the_sum_says_what_it_buys() -> None:
    silent = []
    for commit in git("log", "-20", "--format=%H", "--", str(STORED)).split():
        before, now = (git("show", f"{revision}:tests/{STORED.name}") for revision in (f"{commit}^", commit))
        if before and now and int(now) > int(before) and "buy" not in git("log", "-1", "--format=%B", commit):
            silent.append(commit)
    assert silent == []
