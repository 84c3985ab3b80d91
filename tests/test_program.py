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
import torch

from rlhf_kl.program import MODULES, keep_threads, shell_command, short_path


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment's scripts, below the working directory and not on the PATH."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    return folder


def script(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rlhf-kl").touch(mode=0o755)


def test_on_the_path_it_is_the_name(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(scripts)
    monkeypatch.setenv("PATH", str(scripts))
    assert shell_command() == "rlhf-kl"


def test_off_the_path_it_is_the_script_of_this_environment(scripts: Path) -> None:
    script(scripts)
    assert shell_command() == ".venv/bin/rlhf-kl"


def test_another_installation_on_the_path_is_not_meant(scripts: Path, tmp_path: Path) -> None:
    script(scripts)
    script(tmp_path / "elsewhere")
    assert shell_command() == ".venv/bin/rlhf-kl"


def test_without_a_script_it_is_the_module(scripts: Path, tmp_path: Path) -> None:
    script(tmp_path / "elsewhere")
    assert shell_command() == ".venv/bin/python -m rlhf_kl"


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


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
several = pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs GNU's OpenMP and two cores")


@pytest.fixture
def threads_back() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@several
def test_the_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch, threads_back: object) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(1)
    keep_threads(None)
    keep_threads(str(CORES + 1))  # which would be slower than fewer
    assert torch.get_num_threads() == 1
    keep_threads("2")
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    keep_threads("1")
    assert torch.get_num_threads() == 2
