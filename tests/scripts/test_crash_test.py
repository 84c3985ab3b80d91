"""A few kills of the many that `make test-crash` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rlhf_kl.commands.world import World

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_test.py"


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_been(small_world: World) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "3", "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    words = done.stdout.splitlines()[-1].split()
    assert words == ["all", "3", "3"]
