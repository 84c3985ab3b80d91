"""The times, rates and the memory that a row of metrics tells."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Clock:
    """Sums the seconds of blocks and functions by name, until they are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count a block; decorates a function too."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def read(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def speed(row: Mapping[str, Any], seconds: float, samples: int, device: torch.device) -> dict[str, float]:
    """Rates over the whole step by the wall clock: evaluation, logging and checkpoints included."""
    return {
        "time/step_s": seconds,
        "perf/samples_per_s": samples / seconds,
        "perf/tokens_per_s": samples * row["rollout/response_length"] / seconds,
        "perf/peak_memory_mb": peak_memory_mb(device),
    }


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MiB: of the GPU's allocator, else of this process."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
