"""Detects a dead or blocked process of the group: a collective operation would wait for it forever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EVERY = 2.0  # seconds between two beats
SILENCE = 40.0  # seconds without a beat after which a process counts as dead; a call may hold Python's lock this long


class Heartbeat:
    """A thread that beats in a shared store, and ends this process if another one cannot go on.

    A reward function may take any time: the thread beats during it. Silence is counted in this thread's own beats, so a
    pause of the whole group does not count.
    """

    def __init__(self, store: Any, index: int, count: int, end: Callable[[str], None] | None = None) -> None:
        """`store`: a torch.distributed store of this thread's own."""
        self.store, self.index, self.count = store, index, count
        self.end = end or _end
        self.stopped = threading.Event()
        self.answered = False  # by the store, since the last check of `_watch_store`

    def start(self) -> None:
        """Start the threads."""
        for work in (self._watch, self._watch_store):
            threading.Thread(target=work, daemon=True, name="heartbeat").start()

    def fail(self, reason: str) -> None:
        """Report to the other processes why this one cannot go on, and wait until they have read it."""
        self._say(f"failed/{self.index}", reason)
        time.sleep(1.5 * EVERY)

    def leave(self) -> None:
        """Report that this process has finished, so the others do not wait for it."""
        self._say(f"left/{self.index}", "1")

    def _say(self, key: str, words: str) -> None:
        self.stopped.set()

        def say() -> None:
            with contextlib.suppress(Exception):  # the process with the store may have ended before
                self.store.set(key, words)

        speaker = threading.Thread(target=say, daemon=True)  # the store of a blocked process never answers
        speaker.start()
        speaker.join(EVERY)

    def _watch(self) -> None:
        others = [i for i in range(self.count) if i != self.index]
        beats = dict.fromkeys(others, ("", 0))
        number = 0
        while not self.stopped.wait(EVERY):
            number += 1
            try:
                self.store.set(f"beat/{self.index}", str(number))
                for other in others:
                    if reason := self._look(other, beats):
                        return self.end(reason)
                self.answered = True
            except Exception:  # the process with the store has ended: see `_watch_store`
                continue
        return None

    def _watch_store(self) -> None:
        """The store of a dead process raises; that of a blocked process never answers."""
        missed = 0
        while not self.stopped.wait(EVERY):
            missed = 0 if self.answered else missed + 1
            self.answered = False
            if missed * EVERY > SILENCE:
                return self.end(f"the first process of the group has not answered for {SILENCE:.0f} s")
        return None

    def _look(self, other: int, beats: dict[int, tuple[str, int]]) -> str | None:
        """Why process `other` cannot go on; None if it can, or has finished."""
        if self._read(f"left/{other}"):
            return None
        if reason := self._read(f"failed/{other}"):
            return f"process {other} failed: {reason}"
        beat, (last, missed) = self._read(f"beat/{other}"), beats[other]
        beats[other] = (beat, missed + 1 if beat == last else 0)
        if beats[other][1] * EVERY > SILENCE:
            return f"process {other} has not answered for {SILENCE:.0f} s"
        return None

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _end(reason: str) -> None:
    print(f"error: {reason}; --resume goes on from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(1)
