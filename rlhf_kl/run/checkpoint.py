"""Checkpoints: safetensors and JSON, whole or not there at all.

A checkpoint is written under a temporary name, synced and renamed; an old one is renamed aside and then
removed. A folder named step-000010 was therefore complete when it got its name, whatever happened to the
process; checksums tell whether it still is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

CHECKSUMS = "checksums.json"
_NAME = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"\.(.+)\.(\d+\.tmp|removed|replaced)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: the model, the optimizer's tensors, and everything else as JSON."""

    path: Path

    @property
    def step(self) -> int:
        """The last update that it contains."""
        return int(self.path.name.removeprefix("step-"))

    def state(self) -> dict[str, Any]:
        """The JSON part."""
        state: dict[str, Any] = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        return state

    def load_model(self, model: nn.Module) -> None:
        """Weights into a module of the same shape, tied tensors included."""
        load_model(model, self.path / "model.safetensors")

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name."""
        tensors: dict[str, Tensor] = load_file(self.path / "optimizer.safetensors")
        return tensors

    def damage(self) -> str | None:
        """What is wrong with its files; None where all are as they were written."""
        return damage(self.path)


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    *,
    every: int = 1,
    spared: Collection[int] = (),
) -> Checkpoint:
    """Write checkpoint `step` into `folder`, then `prune`."""

    def write(place: Path) -> None:
        save_model(model, str(place / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, place / "optimizer.safetensors")
        (place / "state.json").write_text(json.dumps(state), encoding="utf-8")

    target = folder / f"step-{step:06d}"
    write_folder(target, write, checksums=True)
    shutil.rmtree(_damaged(target), ignore_errors=True)
    prune(folder, keep, every=every, spared={step, *spared})
    return Checkpoint(target)


def prune(folder: Path, keep: int, *, every: int = 1, spared: Collection[int] = ()) -> None:
    """Drop old checkpoints.

    Kept are the newest one, the newest `keep` of those at a multiple of `every` (one that a signal made in
    between displaces none of them, so an interrupted run keeps what the uninterrupted one would), and `spared`.
    """
    found = checkpoints(folder)
    regular = [checkpoint.step for checkpoint in found if checkpoint.step % every == 0]
    kept = {*(checkpoint.step for checkpoint in found[-1:]), *regular[-keep:], *spared}
    for old in found:
        if old.step not in kept:
            remove_folder(old.path)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [Checkpoint(path) for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are as they were written, and what is wrong with newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        found = checkpoint.damage()
        if found is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.path.name}: {found}")
    return None, problems


def set_aside(checkpoint: Checkpoint) -> None:
    """A damaged checkpoint under a name that is no checkpoint's, until its step is written anew."""
    aside = _damaged(checkpoint.path)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.path.rename(aside)


def _damaged(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


# ---- checksums ----


def damage(folder: Path) -> str | None:
    """How the files of a folder written with checksums differ from what was written; None where they do not."""
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
                return f"{name} is not as it was written (checksum)"
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
        with safe_open(path, framework="pt"):  # checks that the file is as long as its header says
            pass
    digests = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


# ---- folders ----


def write_folder(target: Path, write: Callable[[Path], None], *, checksums: bool = False) -> None:
    """Make `target` with what `write(temporary)` puts there: afterwards it is whole, or as it was before.

    checksums: add the file that `damage` compares with (for folders without subfolders).
    Errors: OSError where the disk is full or fails.
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
            _sync(path)
        _sync(temporary)
        _replace(target, temporary)
    except SafetensorError as error:
        raise _as_os_error(error, target) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(target: Path, temporary: Path) -> None:
    """The old folder goes only after the new one has its name on the disk; `sweep` mends a crash in between."""
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
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Rename aside, then remove: the name never stands for half a folder."""
    if not folder.exists():
        return
    aside = _aside(folder, "removed")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path, names: re.Pattern[str] = _NAME) -> None:
    """Clears up what killed processes left of the named folders inside; nobody may be writing there."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not names.fullmatch(match[1]) or not path.is_dir():
            continue
        target = folder / match[1]
        if match[2] == "replaced" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _aside(folder: Path, why: str) -> Path:
    return folder.parent / f".{folder.name}.{why}"


def _as_os_error(error: SafetensorError, target: Path) -> OSError:
    """safetensors wraps what the system said into words."""
    match = re.search(r"os error (\d+)", str(error))
    number = int(match[1]) if match else errno.EIO
    return OSError(number, os.strerror(number), str(target))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; a file that cannot be synced is lost.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
