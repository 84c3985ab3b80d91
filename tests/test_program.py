"""Commands that the program prints work where the user stands."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlhf_kl.program import MODULES, shell_command, short_path


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment's scripts, below the working directory and not on the PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


@pytest.mark.parametrize(
    ("present", "path", "expected"),
    [
        ([".venv/bin"], ".venv/bin", "rlhf-kl"),
        ([".venv/bin"], "elsewhere", ".venv/bin/rlhf-kl"),
        ([".venv/bin", "elsewhere"], "elsewhere", ".venv/bin/rlhf-kl"),  # another installation
        (["elsewhere"], "elsewhere", ".venv/bin/python -m rlhf_kl"),
    ],
)
def test_a_command_is_named_so_that_it_runs_here(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, present: list[str], path: str, expected: str
) -> None:
    for folder in present:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "rlhf-kl").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(Path(path).absolute()))
    assert shell_command() == expected


@pytest.mark.parametrize("module", MODULES.values())
def test_the_modules_exist(module: str) -> None:
    assert importlib.util.find_spec(module)


def test_a_path_elsewhere_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "my run")) == "'my run'"
    assert short_path("/opt/run") == "/opt/run"


def test_a_printed_command_works_without_the_environment_on_the_path(tmp_path: Path) -> None:
    setting = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=setting, capture_output=True, text=True, check=False)

    advice = re.search(r"such as (.*) train --config", run(sys.executable, "-m", "rlhf_kl", "train").stderr)
    assert advice
    assert run(*shlex.split(advice[1]), "--version").returncode == 0
