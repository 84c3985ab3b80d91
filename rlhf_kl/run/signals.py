"""SIGINT and SIGTERM: finish the update within the grace period, else end at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_kl.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set in its processes
TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # the seconds that torchrun leaves its processes after a signal
TORCHRUN_SECONDS = 30.0  # without the variable, which older versions of torch do not read
SPARE = 10.0  # seconds for a process to end
ECHO = 5.0  # seconds in which torchrun sends on a signal that this process got too


class StopRequest:
    """The first signal that was received, if any."""

    def __init__(self, grace: float) -> None:
        self.grace = grace  # seconds
        self.signal: int | None = None
        self._since = 0.0

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: a second signal, or the end of the grace period, interrupts the work."""
        now = time.monotonic()
        if self.signal is not None:
            if number == self.signal and UNDER_TORCHRUN in os.environ and now - self._since < ECHO:
                return
            raise Interrupted(self.signal)
        self.signal, self._since = number, now
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


def grace_note(grace: float) -> str | None:
    """What to change where torchrun, or accelerate through it, would kill this process before its `grace` is over."""
    given = os.environ.get(TORCHRUN, TORCHRUN_SECONDS)
    if UNDER_TORCHRUN not in os.environ or grace < (limit := float(given)):
        return None
    return (
        f"torchrun kills its processes {limit:g} s after a signal, before checkpoint.grace ({grace:g} s) is over: set "
        f"{TORCHRUN}={grace + SPARE:.0f} for torchrun (a torch whose torchrun has --shutdown-timeout), or "
        f"checkpoint.grace={max(0.0, limit - SPARE):g}"
    )


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
