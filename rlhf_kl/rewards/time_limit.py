"""Calls with a time limit."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from rlhf_kl.errors import InputError


class TimeLimitExceeded(InputError):
    """A call took longer than its time limit."""


class OwnThread:
    """Runs all calls in one separate thread, and abandons a call that takes too long.

    An abandoned call keeps its thread (Python cannot end it). It does not keep the process from ending, and the next
    call gets a new thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...]] | None = None

    def call(self, seconds: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, or its exception. Errors: TimeLimitExceeded after `seconds` (None = never)."""
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
    """For a new thread, whose default is the first GPU: use the GPU of the calling thread."""
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
            # A generator runs here too, not where its result is read.
            answers.put((list(result) if hasattr(result, "__next__") else result, None))
        except BaseException as error:  # the caller gets every exception
            answers.put((None, error))
