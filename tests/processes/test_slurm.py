"""The guide's script for Slurm, with stand-ins for its commands: preempted, and started again as Slurm does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rlhf_kl.commands.guide import FOLDER
from tests.made import Make
from tests.processes import slurm_stand_in
from tests.runs import rows, updates

pytestmark = pytest.mark.slow
UPDATES = 10
REWARD = """
import os, time

def slow(prompts, responses):
    time.sleep(float(os.environ.get("SLOW", "0")))
    return [response.count("a") / 8 for response in responses]
"""


def written(place: Path, settings: dict[str, Any]) -> Path:
    """mine.yaml, and mine.py beside it."""
    (place / "mine.py").write_text(REWARD)
    sections = {
        "run": {"name": "mine", "device": "cpu"},
        "reward": {"kind": f"{place / 'mine.py'}:slow", "missing_eos_penalty": 0.0},
        "ppo": settings["ppo"] | {"total_episodes": 16 * UPDATES},
        "eval": settings["eval"] | {"every": 1000},
    }
    (place / "mine.yaml").write_text(yaml.safe_dump(settings | sections))
    return place / "mine.yaml"


class Cluster:
    """A folder with the guide's script, and a shell that runs it."""

    def __init__(self, place: Path, settings: dict[str, Any], port: int, nodes: int) -> None:
        self.place, self.nodes = place, nodes
        self.run = place / "runs" / "mine"
        written(place, settings)
        pattern = r"^```bash\n(#!/bin/bash\n#SBATCH .*?)^```"
        (script,) = re.findall(pattern, (FOLDER / "cluster.md").read_text(), re.DOTALL | re.MULTILINE)
        for wrong, right in (
            ("29500", str(port)),
            ("--nproc-per-node 8", f"--nproc-per-node {2 // nodes}"),
            ("/shared/huggingface", str(place / "huggingface")),
        ):
            assert wrong in script
            script = script.replace(wrong, right)
        (place / "job").write_text(script)
        (place / "bin").mkdir()
        for name in ("srun", "scancel", "scontrol"):
            source = Path(slurm_stand_in.__file__).read_text()
            (place / "bin" / name).write_text(f"#!{sys.executable}\n{source}")
            (place / "bin" / name).chmod(0o755)
        self.step, self.requeued = place / "bin" / "step", place / "bin" / "requeued"
        (place / "venv" / "bin").mkdir(parents=True)
        path = os.pathsep.join([str(place / "bin"), str(Path(sys.executable).parent)])
        (place / "venv" / "bin" / "activate").write_text(f"PATH={path}:$PATH\n")

    def start(self, slow: float = 0.0) -> subprocess.Popen[str]:
        """The batch shell. `slow`: seconds of an update."""
        slurm = {"JOB_ID": "7", "JOB_NODELIST": f"node[1-{self.nodes}]", "NNODES": self.nodes, "CPUS_PER_TASK": 8}
        environment = {"SLOW": str(slow), "HOME": str(self.place), "PYTHONPATH": str(Path(__file__).parents[2])}
        self.requeued.unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", "job"],
            cwd=self.place,
            env=os.environ | environment | {f"SLURM_{name}": str(value) for name, value in slurm.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Those of the step that runs."""
        try:
            return slurm_stand_in.descendants(int(self.step.read_text()))
        except (OSError, psutil.NoSuchProcess):
            return []

    def preempt(self, moment: Callable[[], bool], *, shell: bool = True) -> str:
        """Start the script and signal its shell, or the processes of its step, at this moment. Returns the output."""
        job, deadline = self.start(slow=0.4), time.monotonic() + 100
        while not moment():
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for process in [psutil.Process(job.pid)] if shell else self.processes():
            process.send_signal(signal.SIGTERM)
        output = job.communicate(timeout=100)[0]
        assert job.returncode != 0, output
        assert self.requeued.exists() == shell, output  # else Slurm itself requeues it
        assert not self.step.exists()
        return output

    def finish(self) -> None:
        """Start the script; nothing disturbs it."""
        job = self.start()
        output = job.communicate(timeout=100)[0]
        assert job.returncode == 0, output
        assert not self.requeued.exists()

    def done(self) -> int:
        """Updates that were written."""
        return len(updates(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def saved(self) -> int:
        """The step of the last checkpoint."""
        return int(max((self.run / "checkpoints").glob("step-*")).name[5:])


@pytest.fixture(scope="module")
def whole(together: Make, tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody preempts, in two processes."""
    place = tmp_path_factory.mktemp("whole")
    config = written(place, tiny_settings)
    assert together([["train", "--config", config, "--quiet", "--output-dir", place / "run"]]).codes == [[0], [0]]
    return place / "run"


@pytest.mark.rare
def test_a_job_that_is_preempted_three_times_ends_as_one_that_is_not(
    tiny_settings: dict[str, Any], tmp_path: Path, port: int, whole: Path
) -> None:
    cluster = Cluster(tmp_path, tiny_settings, port, nodes=1)
    # In an early update, whether a regular checkpoint follows or not.
    output = cluster.preempt(lambda: (cluster.run / "metrics.jsonl").exists())
    assert "the same command with --resume" in output
    assert cluster.saved() == cluster.done() < UPDATES
    # While the processes start: nothing is lost.
    before = rows(cluster.run)
    cluster.preempt(lambda: len(cluster.processes()) >= 3)
    assert rows(cluster.run) == before
    # By the grace time of a partition, of which the shell is not told.
    cluster.preempt(lambda: cluster.done() > len(before), shell=False)
    assert len(before) < cluster.saved() == cluster.done() < UPDATES
    cluster.finish()
    assert cluster.done() == UPDATES
    assert rows(cluster.run) == rows(whole)


def test_two_nodes_are_preempted_too(tiny_settings: dict[str, Any], tmp_path: Path, port: int, whole: Path) -> None:
    """A launcher for each of two processes."""
    cluster = Cluster(tmp_path, tiny_settings, port, nodes=2)
    cluster.preempt(lambda: cluster.done() == 1)
    assert cluster.saved() == cluster.done() < UPDATES
    cluster.finish()
    assert rows(cluster.run) == rows(whole)
