"""Two launchers, as on two machines: the run of one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.commands.guide import FOLDER
from rlhf_kl.run.log import read_jsonl
from tests.made import Make

GUIDE = FOLDER / "running.md"
ACCELERATE = (
    "-m accelerate.commands.launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank {rank} "
    "--main_process_ip 127.0.0.1 --main_process_port {port}"
)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_two_launchers_of_accelerate_make_the_run_of_one(
    rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, port: int
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", str(tmp_path / "tiny.yaml"), "--quiet", "--output-dir", str(tmp_path / "two")]
    assert rlhf_kl(*words[:-1], tmp_path / "one").code == 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    on_cpu = tiny_settings["run"]["device"] == "cpu"
    started = [
        subprocess.Popen(
            [sys.executable, *ACCELERATE.format(port=port, rank=rank).split(), "-m", "rlhf_kl", *words],
            env=environment | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {"CUDA_VISIBLE_DEVICES": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert_same_run(tmp_path / "one", tmp_path / "two")


def assert_same_run(alone: Path, together: Path) -> None:
    """Six updates in one process, and in two."""
    one, two = ([row for row in read_jsonl(run / "metrics.jsonl") if "kl/token" in row] for run in (alone, together))
    assert [row["dist/world_size"] for row in two] == [2] * 6
    for a, b in zip(one, two, strict=True):
        for key in ("kl/token", "kl/coef", "objective/scores"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), (a["step"], key)


# Two nodes on this machine: `srun OPTION VALUE PROGRAM ...` starts the program twice, as two tasks of a step.
SRUN = """#!/bin/bash
shift 2
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait -n && wait -n
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\nnode2\\n'
"""


def test_the_guides_script_for_slurm_makes_the_run_of_one(
    rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, port: int
) -> None:
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH .*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    script = script.replace("29500", str(port)).replace("--nproc-per-node 4", "--nproc-per-node 1")
    (tmp_path / "job").write_text(script)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = tiny_settings | {"run": {"name": "two", "device": "cpu"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    assert rlhf_kl("train", "--config", tmp_path / "mine.yaml", "--output-dir", tmp_path / "one", "--quiet").code == 0
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "node[1-2]", "NNODES": "2", "CPUS_PER_TASK": "1"}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "job"],
        cwd=tmp_path,
        env=os.environ | environment | {"PATH": path} | {f"SLURM_{name}": value for name, value in slurm.items()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "one", tmp_path / "runs" / "two")
