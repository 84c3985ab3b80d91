from __future__ import annotations

import time

import pytest

from rlhf_kl.run.clock import Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day, which stands still until a test moves it."""
    place = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: place[0])
    return place


def test_seconds_add_up_until_they_are_read(now: list[float]) -> None:
    clock = Clock()

    def work(seconds: float, *, result: str) -> str:
        now[0] += seconds
        return result

    sample, score = clock.timed("sample", work), clock.timed("score", work)
    assert sample(1.0, result="a") == "a"
    now[0] += 50  # between calls nothing counts
    assert sample(2.0, result="b") == "b"
    assert score(4.0, result="c") == "c"
    assert clock.read() == {"sample": 3.0, "score": 4.0}
    assert clock.read() == {}
    score(0.5, result="d")
    assert clock.read() == {"score": 0.5}


def test_a_call_that_fails_counts_too(now: list[float]) -> None:
    clock = Clock()

    def breaks() -> None:
        now[0] += 3.0
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        clock.timed("work", breaks)()
    assert clock.read() == {"work": 3.0}


def test_an_outer_function_counts_what_is_inside_it(now: list[float]) -> None:
    clock = Clock()

    def inner() -> None:
        now[0] += 1.0

    def outer() -> None:
        clock.timed("inner", inner)()
        now[0] += 2.0

    clock.timed("outer", outer)()
    assert clock.read() == {"inner": 1.0, "outer": 3.0}
