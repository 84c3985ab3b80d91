"""Two launchers, as on two machines: the run of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.run.log import read_jsonl

LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port} "
    "--node-rank {rank}",
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank {rank} "
    "--main_process_ip 127.0.0.1 --main_process_port {port}",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_launchers_make_the_run_of_one(
    launcher: str, rlhf_kl: Callable[..., Any], tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", str(tmp_path / "tiny.yaml"), "--quiet", "--output-dir", str(tmp_path / "two")]
    assert rlhf_kl(*words[:-1], tmp_path / "one").code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    on_cpu = tiny_settings["run"]["device"] == "cpu"
    started = [
        subprocess.Popen(
            [sys.executable, *LAUNCHERS[launcher].format(port=port, rank=rank).split(), "-m", "rlhf_kl", *words],
            env=environment | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {"CUDA_VISIBLE_DEVICES": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    runs = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    one, two = ([row for row in rows if "kl/token" in row] for rows in runs)
    assert [row["dist/world_size"] for row in two] == [2] * 6
    for a, b in zip(one, two, strict=True):
        for key in ("kl/token", "kl/coef", "objective/scores"):
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), (a["step"], key)
