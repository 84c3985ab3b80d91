"""Which process of a group is missing: each tells the group's store once a second that it goes on.

torchrun keeps that store, so it outlives every process; without torchrun the first process keeps it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")
BEAT = 1.0  # seconds between two signs of life
GAP = 3.0  # seconds between two looks at them
LIMIT = 10.0  # seconds for an answer of the store


class Beat(NamedTuple):
    """The last sign of life of a process."""

    rank: int
    number: int
    exchanges: int
    host: str


class Heartbeat:
    """The signs of life of one process, sent by a thread until `close`, and a look at those of the others."""

    def __init__(self, group: str, rank: int, count: int, exchanges: Callable[[], int]) -> None:
        """`group`: its name; `exchanges`: how many this process has begun."""
        self.rank, self.count, self._exchanges = rank, count, exchanges
        self._machine, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: on torch's one a call waits until the call of another thread has its answer.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._machine, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT)
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store of earlier ones
        self._store = dist.PrefixStore(f"rlhf-kl {attempt} {group}", store)  # type: ignore[attr-defined]
        self._ended = threading.Event()
        self._tell(0)
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more signs of life."""
        self._ended.set()
        self._thread.join(BEAT)

    def _tell(self, number: int) -> None:
        self._store.set(str(self.rank), f"{number} {self._exchanges()} {socket.gethostname()}")

    def _go_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
            for number in itertools.count(1):
                if self._ended.wait(BEAT):
                    return
                self._tell(number)

    def ask(self, question: Callable[[Any], T]) -> T | None:
        """What the store answers; None where it does not: a machine that went off keeps a call waiting."""
        answers: list[T] = []

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question(self._store))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(LIMIT)
        return answers[0] if answers else None

    def _look(self) -> list[Beat] | None:
        found = self.ask(lambda store: store.multi_get([str(rank) for rank in range(self.count)]))
        parts = [value.decode().split(" ", 2) for value in found or ()]
        return [Beat(rank, int(n), int(done), host) for rank, (n, done, host) in enumerate(parts)] or None

    def missing(self, *, late: bool) -> str | None:
        """The processes that show no sign of life, in words; None where nothing is known. Takes seconds.

        Where an exchange came too `late` and all show one, those that have begun the fewest exchanges.
        """
        first = self._look()
        time.sleep(GAP if first else 0.0)
        second = self._look() if first else None
        if first is None or second is None:
            return None if self.rank == 0 else f"process 0, or its machine {self._machine},"
        still = [now for before, now in zip(first, second, strict=True) if now == before and now.rank != self.rank]
        fewest = min(beat.exchanges for beat in second)
        behind = [beat for beat in second if beat.exchanges == fewest]
        if still:
            return _names(still)
        return f"{_names(behind)}, behind the others," if late and len(behind) < self.count else None


def _names(beats: Iterable[Beat]) -> str:
    """process 1 on node1; processes 1, 2 on node1, 8 on node2."""
    hosts: dict[str, list[str]] = {}
    for beat in beats:
        hosts.setdefault(beat.host, []).append(str(beat.rank))
    several = sum(map(len, hosts.values())) > 1
    places = ", ".join(f"{', '.join(ranks)} on {host}" for host, ranks in hosts.items())
    return f"{'processes' if several else 'process'} {places}"
