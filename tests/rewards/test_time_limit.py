from __future__ import annotations

import threading
import time

import pytest

from rlhf_kl.rewards.time_limit import TimeLimited, TimeLimitExceeded


def test_results_and_errors_come_through() -> None:
    assert TimeLimited(lambda x, y: x + y, 5.0)(1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        TimeLimited(lambda: 1 / 0, 5.0)()
    with pytest.raises(SystemExit):
        TimeLimited(lambda: exit(3), 5.0)()


def test_a_call_that_hangs_is_given_up_and_the_next_one_works() -> None:
    release = threading.Event()
    limited = TimeLimited(lambda wait: release.wait(30) if wait else "done", 0.1)
    began = time.monotonic()
    with pytest.raises(TimeLimitExceeded, match=r"longer than 0\.1 s"):
        limited(True)
    assert time.monotonic() - began < 5
    assert limited(False) == "done"
    release.set()


def test_a_generator_is_run_within_the_limit() -> None:
    def slowly() -> object:
        yield 1.0
        time.sleep(10)
        yield 2.0

    with pytest.raises(TimeLimitExceeded):
        TimeLimited(slowly, 0.1)()
    assert TimeLimited(lambda: (float(n) for n in range(3)), 5.0)() == [0.0, 1.0, 2.0]


def test_all_calls_share_a_thread() -> None:
    limited = TimeLimited(threading.get_ident, 5.0)
    assert limited() == limited() != threading.get_ident()
