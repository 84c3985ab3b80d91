from __future__ import annotations

import os
import sys

import pytest
import torch

from rlhf_kl.threads import keep_threads

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
several = pytest.mark.skipif(CORES < 2 or sys.platform != "linux", reason="needs GNU's OpenMP and two cores")


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
