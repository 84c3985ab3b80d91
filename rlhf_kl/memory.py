"""Full memory: detects it on each device, and halves batches until they fit."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from rlhf_kl.errors import MemoryFull

Result = TypeVar("Result")

# torch raises plain RuntimeErrors on a CPU and from libraries of the GPU.
_WORDS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED", "Storage size calculation overflowed")


def memory_is_full(error: BaseException) -> bool:
    """Whether an error means that the memory of a device is full. Does not import torch."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def free_cached_memory() -> None:
    """Free the cache of the GPU's allocator; call it outside of the handler, which holds the failed tensors."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_for(work: str, change: str) -> Iterator[None]:
    """Errors: MemoryFull, with the advice `change`, if `work` does not fit. Decorates a function too."""
    try:
        yield
    except Exception as error:
        if not memory_is_full(error):
            raise
        raise MemoryFull(f"memory is full: {work}", change) from error


def fitting_batches(total: int, rows: int, work: Callable[[int, int], Result], change: str) -> Iterator[Result]:
    """`work(start, stop)` for rows 0 to `total`, `rows` at a time: half as many after they do not fit.

    For work on independent rows. Errors: MemoryFull, with `change`, if a single row does not fit.
    """
    start = 0
    while start < total:
        stop = min(start + rows, total)
        try:
            result = work(start, stop)
        except Exception as error:
            if not memory_is_full(error):
                raise
            if stop - start == 1:
                raise MemoryFull("memory is full: a single row does not fit", change) from error
            rows = (stop - start) // 2
        else:
            yield result
            start = stop
            continue
        free_cached_memory()
