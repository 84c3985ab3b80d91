"""What is asked of a device: operations, kernels, and points where the host waits for it; in each update by phase."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

REST, UPDATE = "rest", "training.loop.TrainLoop.step"
PHASES = {  # the method that does it, which counts all that it calls
    "ppo.rollout.Rollouts.sample": "sampling",
    "rewards.scorer.Scorers.__call__": "scores",
    "ppo.rollout.Rollouts.compare": "figures of the rows",
    "ppo.step.PPOTrainer.backward": "training passes",
    "distributed.Ranks.step": "optimizer",
    "ppo.step.PPOTrainer.kl_now": "KL after the update",
}
COLUMNS = ("operations", "with parts", "kernels", "waits")  # as Python sees them; a linear layer's parts counted, ...
NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense"}


class Counts:
    """Of one command. `waits`: also those between two steps of decoding."""

    def __init__(self) -> None:
        self.places: collections.Counter[str] = collections.Counter()  # where the host waits
        self.steps = self.between = 0  # of decoding; waits between them
        self.open: int | None = None  # waits since the last step; None before the first one of a decoding
        self.phases: dict[str, dict[str, list[int]]] = {}  # by update and phase: COLUMNS
        self.parts = 0  # whether operations are parts of one
        self.phase, self.update = REST, "0"

    @property
    def _here(self) -> list[int]:
        return self.phases.setdefault(self.update, {}).setdefault(self.phase, [0] * len(COLUMNS))

    def operation(self, func: Any = None, *, on_device: bool = True) -> None:
        """One that reaches a device, or the CPU; of those on the device a view has no kernel. None: has one."""
        self._here[0] += not self.parts
        self._here[1] += 1
        self._here[2] += on_device and (func is None or not is_view(func))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside are the parts of one operation."""
        self._here[0] += not self.parts
        self.parts += 1
        try:
            yield
        finally:
            self.parts -= 1

    def wait(self, name: str) -> None:
        """The host waits, in the operation `name`."""
        frame, places = sys._getframe(1), []
        while frame is not None and len(places) < 2:
            if "/rlhf_kl/" in frame.f_code.co_filename:
                places.append(f"{frame.f_code.co_filename.partition('/rlhf_kl/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        self.places[f"{self.phase}: {name} at {' from '.join(places)}"] += 1
        self.open = None if self.open is None else self.open + 1
        self._here[3] += 1

    def step(self) -> None:
        """One more step of the same decoding."""
        self.steps, self.between, self.open = self.steps + 1, self.between + (self.open or 0), 0


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operation computes nothing."""
    views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
    return views or func._schema.name.partition("::")[2] in NO_KERNEL


def mark_phases(now: Callable[[], Counts]) -> None:
    """Let the methods of the program tell what they do. `now`: the counts of the command that runs."""

    def marked(method: Callable[..., Any], phase: str, numbered: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            counts = now()
            before = counts.phase, counts.update
            counts.phase, counts.update = phase, str(args[1]) if numbered else counts.update
            try:
                return method(*args, **kwargs)
            finally:
                counts.phase, counts.update = before

        return call

    for name, phase in (PHASES | {UPDATE: REST}).items():
        module, owner, method = name.rsplit(".", 2)
        holder = getattr(importlib.import_module(f"rlhf_kl.{module}"), owner)
        setattr(holder, method, marked(getattr(holder, method), phase, name == UPDATE))
