"""One small run of each script that a make target starts."""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """A script's outcome; it must end well."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_been() -> None:
    assert script("crash_test.py", "--kills", 1).stdout.splitlines()[-1] == "all 1 1"


def test_figures_names_the_results_that_another_program_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    figures = importlib.import_module("figures")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "program", lambda at="new": at)
    for commit in ("old", "new"):
        (tmp_path / f"{commit}.json").write_text(f'{{"commit": "{commit}"}}', encoding="utf-8")
    assert figures.old_results() == {"old": "old"}


def test_this_environment_is_complete() -> None:
    script("environment.py", "--check-dev")


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.py")), ids=lambda file: file.stem)
def test_what_a_script_imports_of_the_program_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_kl"):
            module = importlib.import_module(node.module or "")
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            for name in missing:
                importlib.import_module(f"{node.module}.{name}")  # a module


def test_the_tests_of_each_promise_are_there() -> None:
    for names in runpy.run_path(str(SCRIPTS / "reliability.py"))["TESTS"].values():
        for file, _, test in (name.partition("::") for name in names):
            assert f"def {test}(" in (SCRIPTS.parent / file).read_text(encoding="utf-8") or not test
