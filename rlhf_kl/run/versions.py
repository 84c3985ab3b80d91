"""Package versions, and the git revision of the working directory."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "rlhf-kl",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "datasets",
    "peft",
    "numpy",
    "pydantic",
    "tensorboard",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that influence a result; imports none of them."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def git_revision(path: Path) -> str | None:
    """Commit of the repository around `path`, with `-dirty` if tracked files differ; None without a repository."""
    commit = _git(path, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(path, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes else commit


def _git(path: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
