"""Notices that another process of the group has died or stands still; a collective would wait for it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EVERY = 2.0  # seconds between two beats
SILENCE = 40.0  # seconds without one, after which a process counts as gone; a call may hold Python's lock so long


class Heartbeat:
    """A thread that beats in a store all processes see, and ends this process where another one cannot go on.

    A reward function may take as long as it wants: the thread beats beside it. Silence is counted in this thread's own
    beats, so that a group that is paused as a whole, and goes on, has missed nothing.
    """

    def __init__(self, store: Any, index: int, count: int, end: Callable[[str], None] | None = None) -> None:
        """`store`: a torch.distributed store of this thread's own."""
        self.store, self.index, self.count = store, index, count
        self.end = end or _end
        self.stopped = threading.Event()
        self.answered = False  # by the store, since `_watch_store` looked

    def start(self) -> None:
        """Begin to beat."""
        for work in (self._watch, self._watch_store):
            threading.Thread(target=work, daemon=True, name="heartbeat").start()

    def fail(self, reason: str) -> None:
        """Tell the others that this process cannot go on, and why; they have time to read it before it is gone."""
        self._say(f"failed/{self.index}", reason)
        time.sleep(1.5 * EVERY)

    def leave(self) -> None:
        """This process has come to its end; nobody waits for it."""
        self._say(f"left/{self.index}", "1")

    def _say(self, key: str, words: str) -> None:
        self.stopped.set()

        def say() -> None:
            with contextlib.suppress(Exception):  # the process that holds the store may have gone before
                self.store.set(key, words)

        speaker = threading.Thread(target=say, daemon=True)  # a store whose process stands still never answers
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
            except Exception:  # the process that holds the store is gone: see `_watch_store`
                continue
        return None

    def _watch_store(self) -> None:
        """A store whose process is gone raises; one whose process stands still answers nothing at all."""
        missed = 0
        while not self.stopped.wait(EVERY):
            missed = 0 if self.answered else missed + 1
            self.answered = False
            if missed * EVERY > SILENCE:
                return self.end(f"the first process of the group has given no sign for {SILENCE:.0f} s")
        return None

    def _look(self, other: int, beats: dict[int, tuple[str, int]]) -> str | None:
        """Why process `other` cannot go on; None where it can, or has come to its end."""
        if self._read(f"left/{other}"):
            return None
        if reason := self._read(f"failed/{other}"):
            return f"process {other} failed: {reason}"
        beat, (last, missed) = self._read(f"beat/{other}"), beats[other]
        beats[other] = (beat, missed + 1 if beat == last else 0)
        if beats[other][1] * EVERY > SILENCE:
            return f"process {other} has given no sign for {SILENCE:.0f} s"
        return None

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _end(reason: str) -> None:
    print(f"error: {reason}; --resume goes on from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(1)
