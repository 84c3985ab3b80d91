"""The folder of one run: its paths, its lock, and what `--overwrite` may remove."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO, Any

from rlhf_kl.errors import InputError
from rlhf_kl.run import contents
from rlhf_kl.run.files import write_bytes_atomic
from rlhf_kl.run.jsonl import encode_json

RUNS = Path("runs")
# POSIX locks do not exclude a process from itself, and closing any handle of the file drops them.
_held: set[Path] = set()
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # some network file systems


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented strict JSON (NaN becomes null), atomically."""
    write_bytes_atomic(path, encode_json(value, indent=2) + b"\n")


class RunFolder:
    """Paths of a run folder, for reading; `open_run_folder` returns one that may be written."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / contents.METRICS
        self.samples = self.path / contents.SAMPLES
        self.tensorboard = self.path / contents.TENSORBOARD
        self.checkpoints = self.path / contents.CHECKPOINTS
        self.final = self.path / "final"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self._lock: IO[str] | None = None
        self._key = self.path.resolve()  # now: the working directory may change later
        self.locked = False
        self.replaces = False  # it holds a run that `clear` removes when the new one starts

    @property
    def holds_run(self) -> bool:
        return any(path.exists() for path in (self.config, self.metrics, self.checkpoints))

    def claim(self, name: str) -> Path:
        """The path of a further file of the program's own (a copied plugin, a picture), directly inside.

        Claimed files are what `--overwrite` removes beside the fixed names.
        """
        return contents.claim(self.path, name)

    def clear(self) -> None:
        """Remove the run that `--overwrite` replaces, if there is one."""
        if self.replaces:
            contents.remove_run(self.path)
            self.replaces = False

    def check_there(self) -> None:
        """Errors: FileNotFoundError if the folder was removed or replaced since it was opened for writing.

        Without this check a run would write to deleted files.
        """
        if self._lock is None:
            return
        ours = os.fstat(self._lock.fileno())
        try:
            there = (self.path / contents.LOCK).stat()
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise FileNotFoundError(errno.ENOENT, "the folder was removed or replaced", str(self.path))

    def release(self) -> None:
        """Gives the lock back (the end of the process does the same)."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            _held.discard(self._key)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def open_run_folder(path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """Makes or reopens the run folder at `path` and locks it for this process.

    With `overwrite` the run in it stays until `RunFolder.clear`: a run that cannot start removes nothing.
    Errors: InputError if the folder holds a run and neither `resume` nor `overwrite` is set, if it holds files that
    are not a run (with either option too), if a file of the run is a link, if another run is using the folder, and if
    it cannot be written. The folder itself may be a link.
    """
    folder = RunFolder(path)
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: choose one")
    try:
        _refuse(folder, resume=resume, overwrite=overwrite)  # before anything is touched
        folder.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.path):  # the lock file alone may be writable
            pass
        _acquire(folder)
        try:
            _refuse(folder, resume=resume, overwrite=overwrite)  # it may have changed before the lock
            folder.replaces = overwrite
            contents.remove_leftovers(folder.path)
        except BaseException:
            folder.release()
            raise
    except OSError as error:
        raise InputError(f"cannot write the run folder {path}: {error.strerror or error}") from error
    return folder


def newest_run(*, finished: bool = False) -> Path:
    """The run in runs/ with the newest metrics; `finished`: only runs with a final model.

    Errors: InputError if there is none.
    """
    written = []
    for config in RUNS.glob("*/config.yaml"):
        folder = RunFolder(config.parent)
        with contextlib.suppress(OSError):  # a run that has not made an update
            if folder.final.is_dir() or not finished:
                written.append((folder.metrics.stat().st_mtime, folder.path))
    if not written and finished:
        raise InputError(f"no finished run under {RUNS}/: name one with --run, or a model with --model")
    if not written:
        raise InputError(f"no run under {RUNS}/: name a run folder")
    return max(written)[1]


def _refuse(folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    path = folder.path
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file: choose another --output-dir")
    if any(entry.name not in {contents.LOCK, contents.CLAIMS} for entry in path.iterdir()):
        if folder.holds_run and not (resume or overwrite):
            raise InputError(f"{path} holds a run: --resume goes on with it, --overwrite starts it anew")
        if not _is_ours(folder):
            raise InputError(f"{path} is not empty and not a run of this program: choose another --output-dir")
    if problems := contents.run_link_problems(path):
        raise InputError(*problems)


def _is_ours(folder: RunFolder) -> bool:
    """A lone `config.yaml` may be anybody's; with our lock file or a run's records beside it, it is ours."""
    if (folder.path / contents.LOCK).exists():
        return True
    steps = bool(contents.checkpoint_folders(folder.checkpoints))
    return folder.config.exists() and (folder.metrics.exists() or steps)


def _acquire(folder: RunFolder) -> None:
    path = folder.path / contents.LOCK
    if folder._key in _held:
        raise InputError(f"{folder.path} is in use by another run of this process")
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        owner = lock.read(200).strip() or "another process"
        lock.close()
        raise InputError(
            f"{folder.path} is in use by {owner}: wait for it, stop it, or choose another --output-dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
    else:
        folder.locked = True
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    folder._lock = lock
    _held.add(folder._key)
