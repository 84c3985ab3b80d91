"""torchrun and its processes as forks of a process that has imported torch and the program, which takes seconds.

A script that succeeds must come to its end: torchrun takes `sys.exit(0)` in a fork for a process that still runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed.checkpoint.hf_storage  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from torch.distributed import run

import rlhf_kl.commands.train
import rlhf_kl.training.trainer  # noqa: F401


def torchrun(words: Sequence[str], environment: Mapping[str, str], output: Connection) -> None:
    """In a fork: a script in processes of its own, in a session of their own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    run.main(["--standalone", "--run-path", "--start-method", "fork", *words])


@cache
def forks() -> Any:
    """What starts them; its own process begins with the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class Forked:
    """torchrun, with what the tests need of `subprocess.Popen[str]`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        reads, writes = forks().Pipe(duplex=False)
        self.process = forks().Process(target=torchrun, args=(words, environment, writes))
        self.process.start()
        writes.close()
        self.stdout = os.fdopen(os.dup(reads.fileno()))
        reads.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode  # type: ignore[no-any-return]

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it still prints until its end. After `timeout` seconds it is killed, with its processes."""
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(self.stdout.read()))
        reader.start()
        reader.join(timeout)
        late = reader.is_alive()
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            reader.join()
        self.process.join()
        self.stdout.close()
        assert not late, f"after {timeout} s: {read[0]}"
        return read[0], None
