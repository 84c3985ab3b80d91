"""SIGINT and SIGTERM: finish the update within the grace period, else end at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_kl.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]


class StopRequest:
    """The first signal that was received, if any."""

    def __init__(self, grace: float) -> None:
        self.grace = grace  # seconds
        self.signal: int | None = None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: a second signal, or the end of the grace period, interrupts the work."""
        if self.signal is not None:
            raise Interrupted(self.signal)
        self.signal = number
        if sys.stderr.isatty():  # `os.write` may interrupt a print
            os.write(2, b"\nstopping after this update is done and saved; a second signal stops at once\n")
        signal.setitimer(signal.ITIMER_REAL, max(self.grace, 1e-6))


@contextmanager
def stopping_on_signals(grace: float) -> Iterator[StopRequest]:
    """The block looks for a signal after each step; a step that takes longer than `grace` seconds is interrupted."""
    request = StopRequest(grace)
    with _handling(request.receive, signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        try:
            yield request
        finally:
            if request.signal is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Outside of the loop SIGTERM ends the command as Ctrl-C does: at once, with cleanup."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handling(end, signal.SIGTERM):
        yield


@contextmanager
def _handling(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
