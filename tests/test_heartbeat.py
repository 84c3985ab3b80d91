"""A process that watches the others, through a store in memory."""

from __future__ import annotations

import threading
import time

import pytest

from rlhf_kl import heartbeat
from rlhf_kl.heartbeat import Heartbeat


class Store:
    """What torch.distributed's store does; `standing` lets no call come back, as one whose process stands still."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.standing = threading.Event()
        self.gone = False

    def _answer(self) -> None:
        if self.gone:
            raise ConnectionError("reset by peer")
        while self.standing.is_set():
            time.sleep(0.01)

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return keys[0] in self.values

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "SILENCE", 0.4)
    return Store()


def watch(store: Store, seconds: float = 1.0, other: bool = True, silent_until: float = 0.0) -> str | None:
    """Why process 0 of two ends, where within some seconds it does; the other one beats."""
    reasons: list[str] = []
    ended = threading.Event()

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watching = Heartbeat(store, 0, 2, end)
    watching.start()
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline and not ended.is_set():
        number += 1
        if other and time.monotonic() > silent_until:
            store.values["beat/1"] = str(number)
        time.sleep(0.02)
    watching.stopped.set()
    return reasons[0] if reasons else None


def test_nothing_ends_while_the_other_beats(store: Store) -> None:
    assert watch(store) is None
    assert int(store.values["beat/0"]) > 5


def test_a_process_that_gives_no_sign(store: Store) -> None:
    assert watch(store, 5.0, other=False) == "process 1 has not answered for 0 s"


def test_a_process_that_says_why_it_failed(store: Store) -> None:
    Heartbeat(store, 1, 2).fail("the disk is full")
    assert watch(store, 5.0, other=False) == "process 1 failed: the disk is full"


def test_nobody_waits_for_a_process_that_came_to_its_end(store: Store) -> None:
    Heartbeat(store, 1, 2).leave()
    assert watch(store, other=False) is None


@pytest.mark.parametrize("how", ["gone", "standing"])
def test_a_store_that_does_not_answer(store: Store, how: str) -> None:
    if how == "gone":
        store.gone = True
    else:
        store.standing.set()
    assert watch(store, 5.0) == "the first process of the group has not answered for 0 s"
    began = time.monotonic()
    Heartbeat(store, 0, 2).fail("told to nobody")
    assert time.monotonic() - began < 1.0
    store.standing.clear()


def test_a_group_that_was_paused_as_a_whole_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process is paused its clock goes on: a wait of each thread takes longer than any silence."""
    wait, resumed = threading.Event.wait, time.monotonic() + 1.0

    def paused(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == heartbeat.EVERY:
            time.sleep(max(0.0, resumed - time.monotonic()))
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", paused)
    assert watch(store, 3.0, silent_until=resumed + 0.1) is None
