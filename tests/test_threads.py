from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlhf_kl.threads import keep_threads

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
several = pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs GNU's OpenMP and two cores")
# Between two parallel sums nothing is to be done: CPU time that passes there is that of threads that wait busily.
WAIT = """
import sys, time
from rlhf_kl.threads import wait_without_spinning
done = wait_without_spinning() if sys.argv[1] == "ours" else None
import torch
x = torch.ones(1 << 20)
x.sum()
began = time.process_time()
for _ in range(300):
    x.sum()
    time.sleep(0.004)
print(done, time.process_time() - began)
"""


def waited(who: str, **variables: str) -> tuple[str, float]:
    """Whether the variables were set, and CPU seconds of two threads that mostly wait."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"OMP_NUM_THREADS": "2", **variables}
    command = [sys.executable, "-c", WAIT, who]
    done, seconds = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return done, float(seconds)


@several
@pytest.mark.slow
def test_threads_that_wait_take_no_time() -> None:
    by_itself = waited("theirs")[1]
    done, ours = waited("ours")
    assert done == "True"
    assert ours < by_itself / 2


@several
@pytest.mark.parametrize(
    ("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "300000"), ("KMP_BLOCKTIME", "200")]
)
@pytest.mark.slow
def test_what_the_user_has_set_stays(name: str, value: str) -> None:
    assert waited("ours", **{name: value})[0] == "False"


@pytest.fixture
def threads_back() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@several
def test_the_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch, threads_back: object) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(1)
    keep_threads(None)
    keep_threads(str(CORES + 1))  # which would be slower than fewer
    assert torch.get_num_threads() == 1
    keep_threads("2")
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    keep_threads("1")
    assert torch.get_num_threads() == 2
