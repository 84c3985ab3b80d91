"""The files of a run folder: their names, checks for links, and their removal."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from rlhf_kl.run.files import write_atomic

LOCK = ".rlhf-kl.lock"  # stays after the run: it also marks the folder as one that this program made
CLAIMS = ".rlhf-kl.files"
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
FILES = ("config.yaml", METRICS, SAMPLES, "summary.json", "report.html")
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"  # a user's files in them stay
MODELS = ("final", "merged")  # folders that belong to the program
TRACKED = "wandb"  # the folder that this tracker makes
IN_PLACE = (LOCK, METRICS, SAMPLES)  # the others are written under a temporary name and renamed
CHECKPOINT = re.compile(r"step-\d{6,}")
_ANY_CHECKPOINT = re.compile(r"\.?(tmp-)?step-\d{6,}([.-]\w+)*")  # with those under a temporary name
_EVENTS = re.compile(r"events\.out\.tfevents\..*", re.DOTALL)


def event_files(tensorboard: Path) -> list[Path]:
    """The files that TensorBoard reads."""
    return _matching(tensorboard, _EVENTS)


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Complete checkpoints."""
    return _matching(checkpoints, CHECKPOINT)


def claims(folder: Path) -> list[str]:
    """Further files of the program's own, by name: copied plugins, pictures.

    Plain names only: an edited line must not lead out of the folder.
    """
    try:
        lines = (folder / CLAIMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return [line for line in lines if is_plain(line)]


def claim(folder: Path, name: str) -> Path:
    """The path of a further file, directly inside, that `remove_run` may remove."""
    if not is_plain(name):
        raise ValueError(f"{name!r} is not a plain file name")
    claimed = claims(folder)
    if name not in claimed:
        write_atomic(folder / CLAIMS, "".join(f"{line}\n" for line in [*claimed, name]))
    return folder / name


def is_plain(name: str) -> bool:
    """Whether it is the name of a file directly inside a folder."""
    return Path(name).name == name and name not in {"", ".", ".."}


# ---- links ----


def link_problems(paths: Iterable[Path]) -> list[str]:
    """A line for each symbolic link: writing to it would change a file elsewhere."""
    return [
        f"{path} is a link: the program writes only inside its folder (the folder itself may be a link)"
        for path in paths
        if path.is_symlink()
    ]


def run_link_problems(folder: Path) -> list[str]:
    """A line for each link among what a run has written or will write in `folder`, hard links included."""
    names = (LOCK, CLAIMS, *FILES, CHECKPOINTS, TENSORBOARD, *MODELS, TRACKED, *claims(folder))
    paths = [folder / name for name in dict.fromkeys(names)]
    for place, pattern in ((folder / CHECKPOINTS, _ANY_CHECKPOINT), (folder / TENSORBOARD, _EVENTS)):
        if not place.is_symlink():
            paths += _matching(place, pattern)
    return link_problems(paths) + [
        f"{path} has a second name (a hard link), and writing would change that file too: replace it by a copy"
        for path in (folder / name for name in IN_PLACE)
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1
    ]


# ---- removal ----


def remove_run(folder: Path) -> None:
    """Removes only files of this program; the config last, so that the folder still is a run after a crash."""
    checkpoints, tensorboard = folder / CHECKPOINTS, folder / TENSORBOARD
    models = [folder / name for name in (*MODELS, TRACKED)]
    for path in [*_matching(checkpoints, _ANY_CHECKPOINT), *models, *event_files(tensorboard)]:
        _remove(path)
    for container in (tensorboard, checkpoints):
        with contextlib.suppress(OSError):  # absent, or something of the user's is left in it
            container.rmdir()
    for name in [*claims(folder), CLAIMS, *reversed(FILES)]:
        _remove_file(folder / name)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Files under a temporary name, of processes that were killed."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.name.removeprefix(".").rsplit(".", 2)[0] in {*FILES, CLAIMS}:
            _remove_file(leftover)


def _matching(parent: Path, pattern: re.Pattern[str]) -> list[Path]:
    return sorted(p for p in parent.iterdir() if pattern.fullmatch(p.name)) if parent.is_dir() else []


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        _remove_file(path)


def _remove_file(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
