"""Seconds of the parts of an update; rates, and peak memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Clock:
    """Wraps functions, and sums the seconds of each until they are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The same function; its seconds count under `name`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return call

    def read(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def speed(row: dict[str, Any], seconds: float, samples: int, device: torch.device) -> dict[str, float]:
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
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
