"""Several hearts in this process, each as of a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from torch import distributed as dist

from rlhf_kl import heartbeat
from rlhf_kl.heartbeat import Beat, Heartbeat, _names

Start = Callable[..., list[Heartbeat]]


@pytest.fixture
def server() -> SimpleNamespace:
    """Its `store` may be taken away."""
    return SimpleNamespace(store=dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, server: SimpleNamespace) -> Iterator[Start]:
    """start(2, 2, 1): the hearts of three processes, which have begun so many exchanges."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.store.port))
    for name, seconds in (("BEAT", 0.02), ("GAP", 0.2), ("LIMIT", 0.5)):
        monkeypatch.setattr(heartbeat, name, seconds)
    hearts: list[Heartbeat] = []

    def make(*exchanges: int) -> list[Heartbeat]:
        for rank, done in enumerate(exchanges):
            hearts.append(Heartbeat("1", rank, len(exchanges), lambda done=done: done))  # type: ignore[misc]
        return hearts

    yield make
    for heart in hearts:
        heart.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dead", [[0], [2], [0, 1]])
def test_those_without_a_sign_of_life_are_named(start: Start, dead: list[int], late: bool) -> None:
    hearts = start(5, 5, 5, 5)
    for rank in dead:
        hearts[rank].close()
    words = hearts[3].missing(late=late)
    assert words is not None
    assert words.partition(" on ")[0].split(" ", 1)[1] == ", ".join(map(str, dead))


@pytest.mark.parametrize(
    ("exchanges", "late", "named"), [((7, 7, 6), True, True), ((7, 7, 6), False, False), ((7, 7, 7), True, False)]
)
def test_of_those_that_go_on_the_one_behind_is_named_where_it_was_waited_for(
    start: Start, exchanges: tuple[int, ...], late: bool, named: bool
) -> None:
    words = start(*exchanges)[0].missing(late=late)
    assert words is None if not named else words is not None and words.startswith("process 2 on ")


def test_without_a_store_the_first_process_is_named_by_the_others(start: Start, server: SimpleNamespace) -> None:
    first, second = start(1, 1)
    del server.store
    began = time.monotonic()
    assert first.missing(late=False) is None
    words = second.missing(late=False)
    assert words is not None
    assert words.startswith("process 0")
    assert "127.0.0.1" in words
    assert time.monotonic() - began < 5
    second._thread.join(1)  # a heart without a store stops by itself
    assert not second._thread.is_alive()


def test_a_store_that_does_not_answer_is_not_waited_for(start: Start) -> None:
    (heart,) = start(1)
    began = time.monotonic()
    assert heart.ask(lambda store: store.get("nobody writes this")) is None
    assert time.monotonic() - began < 2


def test_only_the_first_to_ask_is_the_first(start: Start) -> None:
    one, two = start(1, 1)
    assert one.ask(lambda store: store.add("failed", 1)) == 1
    assert two.ask(lambda store: store.add("failed", 1)) == 2


def test_several_on_several_machines() -> None:
    beats = [Beat(rank, 1, 1, host) for rank, host in ((6, "node1"), (7, "node1"), (8, "node2"))]
    assert _names(beats) == "processes 6, 7 on node1, 8 on node2"
    assert _names(beats[2:]) == "process 8 on node2"
