from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from rlhf_kl.run.versions import git_revision, versions


def test_versions_are_those_installed() -> None:
    installed = versions()
    assert installed["python"] == platform.python_version()
    assert installed["torch"] == metadata.version("torch")
    assert installed["transformers"] == metadata.version("transformers")


def _git(path: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(path), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_git_revision_is_the_commit_and_names_changes(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    assert git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-qm", "a")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "untracked").write_text("")
    assert git_revision(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path) == f"{commit}-dirty"


def test_no_git_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_revision(tmp_path) is None
