"""Calls that may hang: given up after a time."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any


class TimeLimitExceeded(Exception):
    """A call took longer than it may."""


class OwnThread:
    """Calls that all run in one thread of their own, and may be given up.

    A call that was given up keeps that thread (Python cannot end it); it does not keep the process from ending, and
    the next call gets a new one.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...]] | None = None

    def call(self, seconds: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, or what it raised. Errors: TimeLimitExceeded after `seconds` (None = never)."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls, same_device()), daemon=True).start()
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, arguments, answers))
        try:
            result, error = answers.get(timeout=seconds)
        except queue.Empty:
            self._calls = None
            raise TimeLimitExceeded(f"took longer than {seconds:g} s") from None
        if error is not None:
            raise error
        return result


def same_device() -> Callable[[], None]:
    """For a new thread, which begins with the first GPU: takes the one of the thread that calls this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    number = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(number)


def _serve(calls: queue.SimpleQueue[tuple[Any, ...]], prepare: Callable[[], None]) -> None:
    prepare()
    while True:
        function, arguments, answers = calls.get()
        try:
            result = function(*arguments)
            # A generator runs here too, and not where its result is read.
            answers.put((list(result) if hasattr(result, "__next__") else result, None))
        except BaseException as error:  # whatever it is, it belongs to the caller
            answers.put((None, error))
