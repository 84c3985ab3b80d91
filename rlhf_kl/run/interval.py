"""When a run's checkpoints are written: by its steps, and with `checkpoint.every: auto` by the clock too."""

from __future__ import annotations

import math
import time
from typing import Literal

import torch
from torch import nn

from rlhf_kl.text import duration

ABOUT = 4  # checkpoints of a run at least, where `checkpoint.every` is auto; a short run may have 3
MOST_SECONDS = 1800.0  # the same: from one to the next
FEW = {"updates": 5, "steps": 50}  # between two checkpoints for each 5 GB


class Interval:
    """The interval of one run."""

    def __init__(
        self,
        written: int | Literal["auto"],
        size: int,
        total: int,
        unit: Literal["updates", "steps"],
        before: int | None = None,
    ) -> None:
        """`written`: in the config; `size`: bytes of a checkpoint; `total`: `unit`s in the run.

        `before`: of the run that goes on, which keeps it, also where it becomes longer.
        """
        self.size, self.unit, self.auto = size, unit, written == "auto"
        usual = usual_interval(size, total, FEW[unit])
        self.every = written if written != "auto" else min(usual, usual if before is None else before)
        self._saved = time.monotonic()  # the last checkpoint, or the beginning

    def saved(self) -> None:
        """There is a checkpoint now."""
        self._saved = time.monotonic()

    def is_regular(self, step: int) -> bool:
        """Whether every run with this config has this checkpoint: no signal and no clock made it."""
        return step % self.every == 0

    def is_late(self) -> bool:
        """Whether the last checkpoint is too old."""
        return self.auto and time.monotonic() - self._saved > MOST_SECONDS

    def seconds(self, step: float) -> float:
        """Time between two checkpoints where a step takes so many seconds."""
        return interval_seconds(self.every, step, auto=self.auto)

    def words(self) -> str:
        """For the start of the run."""
        return interval_words(self.every, self.size, self.unit, auto=self.auto)


def checkpoint_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a checkpoint: the weights, and AdamW's two moments of those that it trains."""
    moments = [p for group in optimizer.param_groups for p in group["params"]] * 2
    return sum(p.numel() * p.element_size() for p in [*model.parameters(), *moments])


def usual_interval(size: int, total: int, few: int = 5) -> int:
    """Updates between two checkpoints of `size` bytes in a run of `total` updates; at most a quarter, rounded up.

    `few` for each 5 GB: with 5 an update writes 1 GB or so at most.
    """
    return min(few * max(1, math.ceil(size / 5e9)), max(1, math.ceil(total / ABOUT)))


def volume(size: float) -> str:
    """Bytes in words."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{math.ceil(size / 1e6)} MB"


def interval_seconds(every: int, seconds: float, *, auto: bool) -> float:
    """Time between two checkpoints where an update takes so many `seconds`."""
    return min(every * seconds, max(MOST_SECONDS, seconds)) if auto else every * seconds


def interval_words(every: int, size: int, unit: str, *, auto: bool, seconds: float | None = None) -> str:
    """When checkpoints are written, for the start of a run; `seconds`: of an update, where that is known."""
    words = f"a checkpoint every {every} {unit if every > 1 else unit.removesuffix('s')} ({volume(size)}"
    if seconds is not None:
        words += f", about every {duration(interval_seconds(every, seconds, auto=auto))}"
    return f"{words}){f', and where {MOST_SECONDS / 60:g} minutes have passed without one' if auto else ''}"
