"""Files that are either the old one or the new one, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path` under a temporary name, syncs it and renames it into place."""
    write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"))


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """`write_atomic` for bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
