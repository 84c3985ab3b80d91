"""One small run of each script that a make target starts."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rlhf_kl.build.world import World

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """A script's outcome; it must end well."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_been(small_world: World) -> None:
    assert script("crash_test.py", "--kills", 1).stdout.splitlines()[-1] == "all 1 1"


@pytest.mark.slow
def test_speed_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model in place of GPT-2 small."""
    bench = runpy.run_path(str(SCRIPTS / "bench.py"))
    sizes = {"hidden_size": 16, "layers": 2, "heads": 2, "vocab_size": 50}
    monkeypatch.setitem(bench["main"].__globals__, "SHAPES", {"gpt2": sizes})
    words = ["--models", "gpt2", "--values", "features", "--dtypes", "float32", "--updates", "3", "--batch", "8"]
    bench["main"](["phases", *words, "--out", str(tmp_path / "bench.json")])
    (run,) = json.loads((tmp_path / "bench.json").read_text())["phases"]
    assert run["samples_per_s"] == pytest.approx(8 / run["step_s"])
    assert run["share_of_update_s"] == pytest.approx(run["floor_of_update_s"] / run["update_s"])


def test_this_environment_is_complete() -> None:
    script("environment.py", "--check-dev")
