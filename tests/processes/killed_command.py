"""Runs one command line in every process of a group; some kill or stop themselves, or find their disk full."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from rlhf_kl import cli
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.run import saving
from rlhf_kl.run.run import Run
from tests import vllm_standin

MOMENTS: dict[str, tuple[Any, str, int]] = {  # what is called, and at which call
    "rollout": (Rollouts, "sample", 3),
    "update": (PPOTrainer, "backward", 6),  # two minibatches in each update
    "checkpoint": (Run, "save", 2),
    "meanwhile": (PPOTrainer, "backward", 10),  # a thread writes the second checkpoint
    "weights": (vllm_standin.PlainLLM, "take", 106),  # one after the other, in the middle of those of a rollout
    "shard": (HuggingFaceStorageWriter, "write_data", 2),  # of the second checkpoint of sharded weights
}


def dying(work: Callable[..., Any], fatal: int) -> Callable[..., Any]:
    calls, end = 0, os.environ.get("ENDED_BY", "SIGKILL")

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fatal and end == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if calls == fatal:
            os.kill(os.getpid(), signal.Signals[end])
        return work(*arguments)

    return call


def slow(folder: Path, step: int, *parts: Any) -> Any:
    time.sleep(5.0 * (step == 4))
    return write(folder, step, *parts)


if __name__ == "__main__":
    vllm_standin.install()
    ranks, moment, *words = sys.argv[1:]
    if moment == "meanwhile":
        write, saving.save_checkpoint = saving.save_checkpoint, slow
    if os.environ["RANK"] in ranks.split(","):
        place, name, fatal = MOMENTS[moment]
        setattr(place, name, dying(getattr(place, name), fatal))
    if code := cli.run(words):
        sys.exit(code)
