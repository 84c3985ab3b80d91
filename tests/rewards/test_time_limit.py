from __future__ import annotations

import threading
import time

import pytest
import torch

from rlhf_kl.rewards.time_limit import OwnThread, TimeLimitExceeded


def test_results_and_errors_come_through() -> None:
    thread = OwnThread()
    assert thread.call(5.0, lambda x, y: x + y, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(5.0, lambda: 1 / 0)
    with pytest.raises(SystemExit):
        thread.call(5.0, lambda: exit(3))


def test_a_call_that_hangs_is_given_up_and_the_next_one_works() -> None:
    release, thread = threading.Event(), OwnThread()
    began = time.monotonic()
    with pytest.raises(TimeLimitExceeded, match=r"longer than 0\.1 s"):
        thread.call(0.1, release.wait, 30)
    assert time.monotonic() - began < 5
    assert thread.call(5.0, lambda: "done") == "done"
    release.set()


def test_a_generator_is_run_within_the_limit() -> None:
    def slowly() -> object:
        yield 1.0
        time.sleep(10)
        yield 2.0

    with pytest.raises(TimeLimitExceeded):
        OwnThread().call(0.1, slowly)
    assert OwnThread().call(5.0, lambda: (float(n) for n in range(3))) == [0.0, 1.0, 2.0]


def test_all_calls_share_a_thread() -> None:
    thread = OwnThread()
    assert thread.call(5.0, threading.get_ident) == thread.call(None, threading.get_ident) != threading.get_ident()


def test_a_thread_has_the_gpu_of_the_one_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device belongs to a thread, and a new one begins with the first."""
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: chosen.append((n, threading.current_thread().name)))
    there = OwnThread().call(5.0, lambda: threading.current_thread().name)
    assert chosen == [(3, there)]
    assert there != threading.current_thread().name
