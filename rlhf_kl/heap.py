"""Memory that tensors give back is kept for the next ones, where glibc manages it."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h
OURS_TO_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; returns whether that was done.

    Every pass takes and frees tensors of the same sizes. By default glibc hands large ones back to the system at once,
    which then clears every page before it gives it out again: with a vocabulary of 50,000 that is a fifth of an
    update. Left alone: other C libraries, and a process whose user has set one of these variables.
    """
    if any(os.environ.get(name) for name in OURS_TO_SET):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  another library's mallopt may mean something else
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
