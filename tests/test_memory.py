from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlhf_kl.errors import MemoryFull
from rlhf_kl.memory import fitting_batches, memory_for, memory_is_full


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(1 << 60),
        lambda: torch.empty(1 << 62),
        lambda: bytearray(1 << 60),
        lambda: np.empty(1 << 58, dtype=np.uint8),
    ],
    ids=["torch", "torch, beyond what can be counted", "python", "numpy"],
)
def test_what_is_raised_here_where_memory_is_full(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert memory_is_full(caught.value)


def test_what_is_raised_elsewhere() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ):
        assert memory_is_full(error), error


def test_other_errors_are_none() -> None:
    for error in (
        RuntimeError("shape"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "full"),
        MemoryFull("a", "b"),
    ):
        assert not memory_is_full(error), error
    with pytest.raises(RuntimeError, match="shape"), memory_for("a pass", "smaller"):
        raise RuntimeError("shape")
    with pytest.raises(MemoryFull, match="a pass: smaller"), memory_for("a pass", "smaller"):
        raise MemoryError


@pytest.mark.parametrize("fits", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("total", [0, 1, 7, 16])
def test_every_row_comes_once_in_batches_that_fit(total: int, fits: int) -> None:
    tried = []

    def work(start: int, stop: int) -> list[int]:
        tried.append(stop - start)
        if stop - start > fits:
            torch.empty(1 << 60)
        return list(range(start, stop))

    batches = list(fitting_batches(total, 8, work, "less"))
    assert [row for batch in batches for row in batch] == list(range(total))
    assert sum(size > fits for size in tried) <= 3  # 8, 4, 2: what did not fit is not tried again


def test_a_row_that_does_not_fit_says_what_to_change() -> None:
    with pytest.raises(MemoryFull, match="a single row does not fit: shorter texts") as caught:
        list(fitting_batches(5, 4, lambda *_: torch.empty(1 << 60), "shorter texts"))
    assert caught.value.exit_code == 1
    with pytest.raises(RuntimeError, match="size of tensor"):
        list(fitting_batches(5, 4, lambda *_: torch.ones(2) + torch.ones(3), "shorter texts"))
