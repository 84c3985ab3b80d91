"""Messages for a full disk, a full memory and a lost folder, with advice."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf_kl.errors import MemoryFull, RunFailed
from rlhf_kl.memory import memory_for
from rlhf_kl.run.checkpoint import newest_whole
from rlhf_kl.run.run_folder import RunFolder

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LESS_MEMORY = "use a smaller model, an adapter (policy.lora={}), smaller batches or shorter texts"
BROKEN = {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE}


@contextlib.contextmanager
def machine_failures(folder: RunFolder) -> Iterator[None]:
    """Errors: RunFailed in place of an OSError of the disk or the run folder, and where memory is full."""
    try:
        with memory_for("the run does not fit", LESS_MEMORY):
            yield
    except MemoryFull as error:
        raise RunFailed(f"{error}; {_way_on(folder)}") from error
    except OSError as error:
        message = _disk_message(folder, error)
        if message is None:
            raise
        raise RunFailed(f"{message}; {_way_on(folder)}") from error


def _disk_message(folder: RunFolder, error: OSError) -> str | None:
    place = str(error.filename or folder.path)
    if error.errno in FULL:
        size = max((_size(path) for path in folder.checkpoints.glob("step-*")), default=0)
        need = f"a checkpoint takes {_megabytes(size)}, " if size else ""
        return f"{place}: {error.strerror}: {need}{room_words(Path(place))}"
    inside = error.filename is not None and Path(place).absolute().is_relative_to(folder.path.absolute())
    return f"{place}: {error.strerror}" if error.errno in BROKEN or inside else None


def room_words(place: Path) -> str:
    """The free room on the disk of `place`, which need not exist, as text."""
    existing = next((p for p in (place, *place.parents) if p.exists()), Path("/"))
    return f"{_megabytes(shutil.disk_usage(existing).free)} are free: make room there, or look at your quota"


def _way_on(folder: RunFolder) -> str:
    checkpoint = newest_whole(folder.checkpoints)[0]
    if checkpoint is None:
        return "there is no checkpoint yet: start the command again"
    return f"the checkpoint of step {checkpoint.step} is complete: --resume goes on from it"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
