"""A disk that is full: a message, and nothing lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.run.checkpoint import checkpoints
from tests.runs import rows, unfinished

Train = Callable[..., dict[str, Any]]


LIMITED = """
import resource, sys
from rlhf_kl import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(cli.run(sys.argv[2:]))
"""


def test_a_full_disk_leaves_the_last_checkpoint_and_names_what_to_free(
    train: Train, tiny_run: Path, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    run = unfinished(tiny_run, tmp_path / "unfinished", 4)
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_settings))
    arguments = ["train", "--config", str(config), "--output-dir", str(run), "--resume"]
    # The rows fit, the next checkpoint does not.
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "30000", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for words in ("step-000006", "File too large", "a checkpoint takes 0.", "MB are free", "step 4 is complete"):
        assert words in line
    assert [c.step for c in checkpoints(run / "checkpoints")] == [2, 4]
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    train(run, resume=True)
    assert rows(run) == rows(tiny_run)
