"""Writes files atomically: after a crash a file is either the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path` under a temporary name, syncs it and renames it into place."""
    write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"))


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """`write_atomic` for bytes."""
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link of that name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def check_writable(path: Path) -> None:
    """Errors: OSError if `write_atomic` could not write `path`, which stays unchanged. For results of long work."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = _temporary(path)
    temporary.open("wb").close()
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; a file that cannot be synced is lost.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
