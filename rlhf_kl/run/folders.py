"""Writes folders atomically: after a crash a folder is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlhf_kl.run.files import sync

CHECKSUMS = "checksums.json"
_LEFTOVER = re.compile(r"\.(.+)\.(\d+\.tmp|removed|replaced)")


def write_folder(target: Path, write: Callable[[Path], None], *, checksums: bool = False) -> None:
    """Make `target` with the files that `write(temporary)` makes: afterwards it is complete, or unchanged.

    checksums: add the file that `damage` compares with (for folders without subfolders).
    Errors: OSError if the disk is full or fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
        if checksums:
            _write_checksums(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        _replace(target, temporary)
    except SafetensorError as error:
        raise _as_os_error(error, target) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(target: Path, temporary: Path) -> None:
    """Remove the old folder only after the new one has its name on the disk; `sweep` repairs a crash in between."""
    old = _aside(target, "replaced")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Rename, then remove: no folder with this name is ever incomplete."""
    if not folder.exists():
        return
    aside = _aside(folder, "removed")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Removes what killed processes left of the named folders; no process may be writing there."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not names.fullmatch(match[1]) or not path.is_dir() or path.is_symlink():
            continue
        target = folder / match[1]
        if match[2] == "replaced" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _aside(folder: Path, why: str) -> Path:
    return folder.parent / f".{folder.name}.{why}"


def _as_os_error(error: SafetensorError, target: Path) -> OSError:
    """The error number that safetensors has put into its message."""
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else errno.EIO
    return OSError(number, os.strerror(number), str(target))


# ---- checksums ----


def damage(folder: Path) -> str | None:
    """The first change to a folder that was written with checksums; None if it is unchanged."""
    try:
        written = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {str(name): str(digest) for name, digest in written.items()}
        present = {path.name for path in folder.iterdir()} - {CHECKSUMS}
        for name in sorted(expected.keys() | present):
            if name not in present:
                return f"{name} is missing"
            if name not in expected:
                return f"{name} is not listed in {CHECKSUMS}"
            if _sha256(folder / name) != expected[name]:
                return f"{name} has changed since it was written (checksum)"
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_checksums(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt"):  # checks the length of the file against its header
            pass
    digests = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=1), encoding="utf-8")
