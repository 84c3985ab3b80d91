"""Which results another program made: `figures.py --list`."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[2] / "scripts" / "figures.py"


def test_a_commit_that_changes_no_figure_leaves_results_as_they_are(tmp_path: Path) -> None:
    program = runpy.run_path(str(FIGURES))["program"]
    program.__globals__["ROOT"] = tmp_path

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(file: str, message: str) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        with (tmp_path / file).open("a", encoding="utf-8") as lines:
            lines.write("a line\n")
        git("add", file)
        git("commit", "-q", "-m", message)
        return git("log", "-1", "--format=%h")

    git("init", "-q")
    first = commit("rlhf_kl/ppo.py", "The program")
    assert program() == first
    commit("rlhf_kl/ppo.py", "A clearer message\n\nResults: unchanged")
    commit("rlhf_kl/guide.md", "A clearer page")
    commit("rlhf_kl/cli.py", "A clearer help")
    commit("README.md", "A clearer front page")
    assert program() == first
    later = commit("rlhf_kl/ppo.py", "A faster update, and Results: unchanged\n\nThe results: unchanged or not.")
    assert program() == later
    assert program(first) == first
