"""Memory of each phase of a run, predicted beside measured: `python scripts/measure_memory.py CONFIG [KEY=VALUE ...]`.

CONFIG trains on a CPU, best with responses that do not end; under torchrun each process prints its own. Measured is
anonymous memory above that after the imports, every few milliseconds, with an allocator that gives memory back; what
of that lies in the mapped files of models is not seen, so the weights should be stored in bfloat16. Predicted is what
`doctor --device-memory` computes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import defaultdict
from functools import wraps
from typing import Any

import peft  # noqa: F401
import torch
import transformers  # noqa: F401

import rlhf_kl.memory
from rlhf_kl import ui
from rlhf_kl.commands.fitting import longest_prompt
from rlhf_kl.commands.options import read_config
from rlhf_kl.commands.train import train_command
from rlhf_kl.ppo.heldout import HeldOut
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.run.run import Run
from rlhf_kl.text import text_table
from rlhf_kl.training import loop
from rlhf_kl.training.footprint import Footprint, Place, total
from rlhf_kl.training.outlines import outlines
from rlhf_kl.training.world_files import with_files

ALLOCATOR = {-1: 1 << 16, -3: 1 << 16, -8: 1}  # of malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
PHASES = {  # by what is called in them
    (loop, "build_setup"): "models loaded",
    (loop, "shard_models"): "models loaded",
    (Rollouts, "sample"): "sampling",
    (Rollouts, "compare"): "reading",
    (Scorers, "__call__"): "scoring",
    (PPOTrainer, "optimize"): "training pass",
    (PPOTrainer, "kl_now"): "KL after the update",
    (HeldOut, "perplexity"): "evaluation",
    (HeldOut, "samples"): "evaluation",
    (Run, "save"): "checkpoint",
}


class Watch:
    """The most memory in each phase, and what is there between two updates."""

    def __init__(self) -> None:
        self.base, self.phase, self.peaks = anonymous(), "start", defaultdict[str, int](int)
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        while True:
            self.note(self.phase)
            time.sleep(0.004)

    def note(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks[phase], anonymous() - self.base)

    def around(self, place: Any, name: str, phase: str) -> None:
        """Note the phase of each call; a phase inside of another is that one's."""
        call = getattr(place, name)

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.phase in PHASES.values():
                return call(*args, **kwargs)
            self.note("at rest" if phase == "sampling" else phase)
            before, self.phase = self.phase, phase
            try:
                return call(*args, **kwargs)
            finally:
                self.phase = before

        setattr(place, name, watched)


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def main() -> None:
    rlhf_kl.memory.keep_freed_memory = lambda: None  # type: ignore[assignment]
    for name, value in ALLOCATOR.items():
        ctypes.CDLL(None).mallopt(name, value)
    torch.ones(64, 64, requires_grad=True).matmul(torch.ones(64, 64)).sum().backward()  # starts torch's own threads
    watch = Watch()
    for (owner, called), phase in PHASES.items():
        watch.around(owner, called, phase)
    ui.start(True)
    config = read_config("train", sys.argv[1], sys.argv[2:])
    train_command(loop.run_train, config, resume=False, overwrite=True)
    processes, files = int(os.environ.get("WORLD_SIZE", "1")), with_files(config)
    place = Place(torch.device("cpu"), processes, 0, longest_prompt(files) or 0)
    phases = Footprint(files, outlines(files, place.prompt), place).phases()
    rows = [[name, *(f"{x / 1e6:.0f}" for x in (total(parts), watch.peaks[name]))] for name, parts in phases.items()]
    shares = [total(parts) / max(1, watch.peaks[name]) for name, parts in phases.items()]
    table = [[*row, f"{share:.2f}"] for row, share in zip(rows, shares, strict=True)]
    print(f"process {os.environ.get('RANK', '0')}\n" + text_table(["MB", "predicted", "measured", "share"], table))


main()
