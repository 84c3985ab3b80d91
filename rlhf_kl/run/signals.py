"""SIGINT and SIGTERM: finish the update within the grace period, else end at once."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlhf_kl.errors import Interrupted

Handler = Callable[[int, FrameType | None], None]
AGAIN_S = 2.0  # between interrupts of work that does not end: a pool of processes may wait for them when it is left
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
        self._waits = queue.SimpleQueue[float]()  # seconds until the next interrupt; a signal handler may put into it
        self._since = 0.0
        self._echo_due = UNDER_TORCHRUN in os.environ
        self._insists = False  # the next signal is the end of the grace period

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: a second signal, or the end of the grace period, interrupts the work."""
        now = time.monotonic()
        if self.signal is not None:
            if self._echo_due and number == self.signal and now - self._since < ECHO and not self._insists:
                self._echo_due = False
                return
            self._waits.put(AGAIN_S)
            raise Interrupted(self.signal)
        self.signal, self._since = number, now
        if sys.stderr.isatty():  # `os.write` may interrupt a print
            os.write(2, b"\nstopping after this update is done and saved; a second signal stops at once\n")
        self._waits.put(max(self.grace, 0.05))  # one that comes just before a wait would not end it

    def insist(self, number: int) -> None:
        """Send the main thread this signal after each wait. A timer of the system would take that of a user's code."""
        wait = self._waits.get()
        while wait >= 0.0:
            try:
                wait = self._waits.get(timeout=min(wait, threading.TIMEOUT_MAX))
            except queue.Empty:
                self._insists = True
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                wait = AGAIN_S

    def end(self) -> None:
        """No more interrupts."""
        self._waits.put(-1.0)


@contextmanager
def stopping_on_signals(grace: float) -> Iterator[StopRequest]:
    """The block looks for a signal after each step; a step that takes longer than `grace` seconds is interrupted."""
    request = StopRequest(grace)
    insistence = threading.Thread(target=request.insist, args=(signal.SIGTERM,), daemon=True)
    with _handling(request.receive, signal.SIGINT, signal.SIGTERM):
        insistence.start()
        try:
            yield request
        finally:
            request.end()
            insistence.join()


def grace_note(grace: float) -> str | None:
    """What to change where torchrun, or accelerate through it, would kill this process before its `grace` is over."""
    given = os.environ.get(TORCHRUN, "").strip()
    limit = float(given) if given.isdecimal() else TORCHRUN_SECONDS  # torchrun refuses other numbers
    if UNDER_TORCHRUN not in os.environ or grace < limit:
        return None
    return (
        f"torchrun kills its processes {limit:g} s after a signal, unless its --shutdown-timeout says otherwise: "
        f"before checkpoint.grace ({grace:g} s) is over. Set {TORCHRUN}={grace + SPARE:.0f} for torchrun (a torch "
        f"whose torchrun has --shutdown-timeout), or checkpoint.grace={max(0.0, limit - SPARE):g}"
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
    if threading.current_thread() is not threading.main_thread():  # only there Python handles signals
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
