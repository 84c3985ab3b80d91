"""Commands that the program prints work where the user stands."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.shell import shell_command, short_path
from tests.made import Make


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


def test_a_path_elsewhere_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "my run")) == "'my run'"
    assert short_path("/opt/run") == "/opt/run"


TALKS = """
import logging, sys, types, warnings
from rlhf_kl import cli
sys.argv = ["rlhf-kl", "--version"]
try:
    cli.main()
except SystemExit:
    pass
library = compile("warnings.warn('old name', FutureWarning); log.warning('slow path')", {file!r}, "exec")
exec(library, {{"warnings": warnings, "log": logging.getLogger("library")}})
warnings.warn("mine")
logging.getLogger("mine").warning("my words")
from transformers.utils import logging as of_transformers
of_transformers.get_logger("transformers.models").warning_once("deprecated")
"""


@pytest.mark.slow
def test_warnings_of_libraries_stay_off_the_terminal_and_those_of_a_user_do_not(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TALKS.format(file=f"{sysconfig.get_path('purelib')}/library/core.py"))

    def told(*options: str) -> str:
        words = [sys.executable, *options, str(script)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stderr

    usual, wanted = told(), told("-W", "default")
    words = ("mine", "my words", "old name", "slow path", "deprecated")
    assert [word for word in words if word in usual] == ["mine", "my words"]
    assert [word for word in words[:4] if word in wanted] == list(words[:4])


def test_a_program_that_is_not_installed_trains_and_reports(
    rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs from its folder, and the package has no version."""
    version = metadata.version

    def known(name: str) -> str:
        if name == "rlhf-kl":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", known)
    settings = tiny_settings | {"ppo": tiny_settings["ppo"] | {"total_episodes": 16}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run = tmp_path / "run"
    for words in (["--version"], ["train", "--config", tmp_path / "run.yaml", "--output-dir", run], ["report", run]):
        outcome = rlhf_kl(*words)
        assert outcome.code == 0, outcome.err
    assert "rlhf-kl" in (run / "final" / "README.md").read_text(encoding="utf-8")
