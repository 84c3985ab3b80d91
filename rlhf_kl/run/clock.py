"""Seconds that the parts of an update take, measured around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Clock:
    """Wraps functions, and adds up the seconds that each takes until they are read."""

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
