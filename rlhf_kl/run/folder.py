"""The folder of a run: its files, its lock, and writing that leaves the old content or the new after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from rlhf_kl.config.contents import INPUTS
from rlhf_kl.errors import InputError, suggestion

RUNS = Path("runs")
EVENTS = "events.out.tfevents.*"  # of TensorBoard
NO_CHECKPOINTS = " (it has none: `compare` removes those of a finished run, unless checkpoint.keep is written)"
LOCK = ".rlhf-kl.lock"  # stays after the run: it also marks the folder as one that this program made
SCALED = re.compile(r"scaled-\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII)  # a policy that `rlhf-kl scale --save` wrote


# What a saved model has; a run writes `final/` and `merged/` as a whole.
OF_A_MODEL = re.compile(r".*\.(safetensors|json|jinja|model|txt|py)|README\.md|additional_chat_templates|__pycache__")


class RunFolder:
    """The paths of a run's files. `lock_run_folder` allows to write them."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.tokens = self.path / "tokens.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.picture = self.path / "report.png"
        self.inputs = self.path / INPUTS
        self.trackers = self.path / "trackers.json"
        self.copies = self.path / ".rlhf-kl.copies"  # the names of copied plugins, with hashes of their contents
        records = (self.config, self.metrics, self.samples, self.tokens, self.summary)
        self.scale = [self.path / f"scale.{end}" for end in ("json", "html", "png")]  # of `rlhf-kl scale`
        self.files = (*records, self.inputs, self.report, self.picture, self.trackers, *self.scale)
        self.final = self.path / "final"
        self.merged = self.path / "merged"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.folders = (self.final, self.merged, self.path / "wandb")

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return any(path.exists() for path in (self.config, self.metrics, self.checkpoints))

    def require_run(self) -> None:
        """Errors: InputError if the folder holds no run, with the nearest one."""
        if self.config.is_file():
            return
        above = self.path.parent
        near = [above / "config.yaml", *(file for at in (self.path, above, RUNS) for file in at.glob("*/config.yaml"))]
        hint = suggestion(str(self.path), {str(file.parent) for file in near if file.is_file()})
        if self.path.is_file():
            hint = f"; did you mean --config {self.path}?"
        elif (self.path / "config.json").is_file() and not near[0].is_file():
            hint = f"; it is a model: did you mean --model {self.path}?"
        raise InputError(f"{self.path}: holds no run (no config.yaml){hint}")

    def finished_summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, else None."""
        if not self.summary.is_file() or not self.final.is_dir():
            return None
        summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        return summary if summary["stopped_by"] is None else None

    def remove_run(self, copies: Collection[str] = ()) -> None:
        """Remove what the program wrote; the config last, so that after a crash the folder still is a run.

        What is a link goes, and what it leads to stays. `copies`: names of plugins that will be written again.
        """
        self.sweep()
        for folder in (self.checkpoints, self.tensorboard):
            if folder.is_symlink():
                folder.unlink()
        scaled = [path for path in self.path.glob("scaled-*") if SCALED.fullmatch(path.name) and not path.is_file()]
        for folder in (*checkpoint_folders(self.checkpoints), *self.folders, *scaled):
            remove_folder(folder)
        own = [self.path / name for name in self._own_copies() if name not in copies]
        for file in (*self.tensorboard.glob(EVENTS), *own, *reversed(self.files)):
            file.unlink(missing_ok=True)

    def check_models(self) -> None:
        """Errors: InputError where `final/` or `merged/`, which a run replaces, holds what no run wrote."""
        folders = [folder for folder in (self.final, self.merged) if folder.is_dir() and not folder.is_symlink()]
        if users := [p for folder in folders for p in sorted(folder.iterdir()) if not OF_A_MODEL.fullmatch(p.name)]:
            raise InputError(
                *(f"{path}: no run wrote it, and the run replaces its folder: move it away" for path in users)
            )

    def check_copies(self, copies: Mapping[str, bytes]) -> None:
        """Errors: InputError where the copy of a plugin would replace a file that no run copied here."""
        own = {*self._own_copies(), *self._unlisted_copies()}
        users = [
            name for name, new in copies.items() if name not in own and _content(self.path / name) not in (None, new)
        ]
        words = "is not the copy that a run made, and the copy of a plugin would replace it: move it away"
        if users:
            raise InputError(*(f"{self.path / name} {words}" for name in users))

    def write_copies(self, copies: Mapping[str, bytes]) -> None:
        """Keep the plugins' files, by name. One that lies here already stays its owner's.

        The list of them comes first, with the old contents and the new: a run that dies in between owns either.
        """
        own = self._own_copies()
        replaced = {*own, *self._unlisted_copies()}
        made = {name: new for name, new in copies.items() if name in replaced or _content(self.path / name) != new}
        listed = {name: [digest] for name, digest in own.items()}
        for name, content in made.items():
            listed[name] = [*listed.get(name, []), _digest(content)]
        if copies or self.copies.is_file():  # also an empty one: without it the copies are an earlier build's
            write_atomic(self.copies, json.dumps(listed))
        for name, content in made.items():
            write_atomic(self.path / name, content)

    def _own_copies(self) -> dict[str, str]:
        """The plugins that were copied here and have not been changed since: name -> hash of the content."""
        made = json.loads(self.copies.read_text(encoding="utf-8")) if self.copies.is_file() else {}
        contents = {name: _content(self.path / name) for name in made if Path(name).name == name}
        digests = {name: _digest(content) for name, content in contents.items() if content is not None}
        return {name: digest for name, digest in digests.items() if digest in made[name]}  # a list, or one hash

    def _unlisted_copies(self) -> set[str]:
        """Names of the copies that an earlier build made, which kept no list: those of the files in its config."""
        if self.copies.is_file() or not self.config.is_file():
            return set()
        return {copy_name(name) for name in re.findall(r"/([^/\n]+\.py):", self.config.read_text(encoding="utf-8"))}

    def sweep(self) -> None:
        """Remove what killed processes left under temporary names."""
        sweep(self.path)
        sweep(self.checkpoints)


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Complete checkpoints."""
    return sorted(p for p in checkpoints.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and p.is_dir())


def checkpoint_step(path: Path) -> int:
    """The last update that a checkpoint contains, by its name."""
    return int(path.name.removeprefix("step-"))


def newest_run(*, finished: bool = False) -> Path:
    """The run of `train` in runs/ with the newest metrics; `finished`: only runs with a final model.

    Errors: InputError if there is none.
    """
    runs = [RunFolder(config.parent) for config in RUNS.glob("*/config.yaml") if _is_of_train(config)]
    written = [run for run in runs if run.metrics.is_file() and (run.final.is_dir() or not finished)]
    if not written:
        raise InputError(f"no {'finished ' * finished}run under {RUNS}/: name the folder of one")
    return max(written, key=lambda run: run.metrics.stat().st_mtime).path


def _is_of_train(config: Path) -> bool:
    """Whether a run's stored config, which has every section, is one of `train`."""
    return "\nppo:" in config.read_text(encoding="utf-8", errors="replace")


# ---- the lock ----


def lock_run_folder(folder: RunFolder, *, resume: bool, overwrite: bool) -> IO[str]:
    """Make a run's folder and lock it for this process, until the returned file is closed.

    A run in it stays with either option. Errors: InputError if the folder holds a run and neither option is set, if
    it holds files that are not a run, if another run is using the folder, and if it cannot be written.
    """
    try:
        check_folder(folder, resume=resume, overwrite=overwrite)  # before anything is touched
        folder.path.mkdir(parents=True, exist_ok=True)
        if (folder.path / LOCK).is_symlink():
            (folder.path / LOCK).unlink()
        lock = (folder.path / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no flock: a forked child would keep it
        except (BlockingIOError, PermissionError):
            with lock:
                lock.seek(0)
                owner = lock.read(200).strip() or "another process"
            hint = "wait for it, stop it, or choose another --output-dir"
            raise InputError(f"{folder.path} is in use by {owner}: {hint}") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        folder.sweep()
    except OSError as error:
        raise InputError(f"cannot write the run folder {folder.path}: {error.strerror or error}") from error
    return lock


def check_folder(folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Errors: InputError for what `lock_run_folder` refuses, but for a run that another process is writing."""
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: choose one")
    path, may_hold_run = folder.path, resume or overwrite
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"{path} is a file: choose another --output-dir")
    if any(entry.name != LOCK for entry in path.iterdir()):
        if folder.holds_run and not may_hold_run:
            ways = "--resume goes on with it, --overwrite starts it anew, another --output-dir keeps it"
            raise InputError(f"{path} holds a run: {ways}")
        # A lone config.yaml may be anybody's.
        records = folder.metrics.exists() or checkpoint_folders(folder.checkpoints)
        if not (path / LOCK).exists() and not (folder.config.exists() and records):
            raise InputError(f"{path} is not empty and not a run of this program: choose another --output-dir")


# ---- files ----


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) under a temporary name, sync it and rename it into place.

    A link of that name, or of the temporary one, is replaced: nothing is written through it. Errors: OSError with the
    file's own name.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


# ---- folders ----


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make `target` with the files that `write(temporary)` makes: with its name it is complete.

    Errors: OSError or SafetensorError if the disk is full or fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    _remove(temporary)
    temporary.mkdir()
    try:
        write(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        remove_folder(target)
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Rename, then remove: no folder with this name is ever incomplete. Of a link only the link is removed."""
    if not os.path.lexists(folder):
        return
    aside = folder.with_name(f".{folder.name}.removed")
    _remove(aside)
    folder.rename(aside)
    sync(folder.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a folder as far as that goes, or a file or link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left of `write_atomic` and `write_folder`, of all names or of one.

    No process may be writing there.
    """
    for path in [*folder.glob(f".{name}.[0-9]*.tmp"), *folder.glob(f".{name}.removed")]:
        _remove(path)


def copy_name(name: str) -> str:
    """Under which a run keeps a plugin's file of this name."""
    return re.sub(r"[^\w.-]", "_", name)


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _content(path: Path) -> bytes | None:
    """Of a file; None without one."""
    return path.read_bytes() if path.is_file() else None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
