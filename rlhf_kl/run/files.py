"""Files that are either the old one or the new one, whatever happens in between."""

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
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def check_writable(path: Path) -> None:
    """For what takes long to make. Errors: OSError where `write_atomic` could not write `path`; it stays as it is."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = _temporary(path)
    temporary.open("wb").close()
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
