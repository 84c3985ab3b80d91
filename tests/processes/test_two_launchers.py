"""Two launchers, as on two machines: the run of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rlhf_kl.run.log import read_jsonl
from tests.made import Make

ACCELERATE = (
    "-m accelerate.commands.launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank {rank} "
    "--main_process_ip 127.0.0.1 --main_process_port {port}"
)


def launched(settings: dict[str, Any], place: Path, port: int) -> list[subprocess.Popen[str]]:
    """`train` of tiny.yaml into `two/`, by a launcher for each of two processes."""
    (place / "tiny.yaml").write_text(yaml.safe_dump(settings))
    words = ["train", "--config", str(place / "tiny.yaml"), "--quiet", "--output-dir", str(place / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    on_cpu = settings["run"]["device"] == "cpu"
    return [
        subprocess.Popen(
            [sys.executable, *ACCELERATE.format(port=port, rank=rank).split(), "-m", "rlhf_kl", *words],
            env=environment | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {"CUDA_VISIBLE_DEVICES": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def test_two_launchers_of_accelerate_make_the_run_of_one(
    rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, port: int
) -> None:
    started = launched(tiny_settings, tmp_path, port)
    told = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    words = ["train", "--config", tmp_path / "tiny.yaml", "--quiet", "--output-dir", tmp_path / "one"]
    assert rlhf_kl(*words).code == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("killed", [0, 1])
def test_one_launcher_s_end_ends_the_other_with_its_reason(
    tiny_settings: dict[str, Any], tmp_path: Path, port: int, killed: int
) -> None:
    long = tiny_settings | {"ppo": tiny_settings["ppo"] | {"total_episodes": 16 * 2000}}
    started = launched(long, tmp_path, port)
    while not list((tmp_path / "two" / "checkpoints").glob("step-*")):
        assert all(process.poll() is None for process in started)
        time.sleep(0.1)
    launcher = psutil.Process(started[killed].pid)
    for process in (launcher, *launcher.children(recursive=True)):  # as a machine that goes off
        process.kill()
    words = " ".join(started[1 - killed].communicate(timeout=20)[0].split())
    assert started[1 - killed].returncode != 0
    # The first launcher takes the store with it, and with the store all signs of life.
    named = f"process 1 on {socket.gethostname()} has" if killed else "process 0, or its machine 127.0.0.1, has"
    assert f"error: {named} ended: --resume goes on" in words
    started[killed].communicate()


def assert_same_run(alone: Path, together: Path) -> None:
    """In one process, and in two."""
    one, two = ([row for row in read_jsonl(run / "metrics.jsonl") if "kl/token" in row] for run in (alone, together))
    assert [row["dist/world_size"] for row in two] == [2] * len(one)
    for a, b in zip(one, two, strict=True):
        for key in ("kl/token", "kl/coef", "objective/scores"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), (a["step"], key)
