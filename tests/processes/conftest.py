"""Two processes on this machine, through gloo, as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.made import Make
from tests.processes.forked import Forked

ON_GPUS = os.environ.get("RLHF_KL_TEST_DEVICE", "cpu").startswith("cuda")


class Together(NamedTuple):
    """What two processes did: the exit codes of each command, by process, and what was printed."""

    codes: list[list[int]]
    output: str


@pytest.fixture(scope="session", autouse=True)
def a_device_for_each() -> None:
    """On GPUs (`make gpu-check`) NCCL wants one for each process: with fewer than two the tests skip."""
    if ON_GPUS and (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"two processes with NCCL need two GPUs, and here is {count or 'none'}")


@pytest.fixture(scope="session")
def launch() -> Make:
    """launch(["-m", "rlhf_kl", ...]): torchrun with two processes of it, in a session of their own.

    launch([SCRIPT, ...]): in forks, which start sooner; not on GPUs, since a fork of what has used CUDA cannot.
    """

    def start(words: Sequence[str | Path], count: int = 2) -> subprocess.Popen[str] | Forked:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        given = ["--nproc-per-node", str(count), *map(str, words)]
        if words[0] != "-m" and not ON_GPUS:
            return Forked(given, environment)
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    return start


@pytest.fixture(scope="session")
def together(launch: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """together([words, words, ...]): these commands one after the other, each in two processes."""

    def run(commands: Sequence[Sequence[Any]], count: int = 2) -> Together:
        place = tmp_path_factory.mktemp("together")
        (place / "commands.json").write_text(json.dumps([[str(word) for word in words] for words in commands]))
        worker = Path(__file__).with_name("several_commands.py")
        process = launch([worker, place / "commands.json", place / "codes"], count)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        codes = [json.loads((place / f"codes.{rank}").read_text()) for rank in range(count)]
        return Together(codes, output)

    return run


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
