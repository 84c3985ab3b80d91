"""Checkpoints: safetensors and JSON, whole or not there at all.

A checkpoint is written under a temporary name, synced and renamed; an old one is renamed aside and then
removed. A folder named step-000010 is therefore complete whatever happened to the process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn


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


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> Checkpoint:
    """Write checkpoint `step` into `folder` and drop all but the newest `keep`."""

    def write(place: Path) -> None:
        save_model(model, str(place / "model.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, place / "optimizer.safetensors")
        (place / "state.json").write_text(json.dumps(state), encoding="utf-8")

    target = folder / f"step-{step:06d}"
    write_folder(target, write)
    for old in checkpoints(folder)[:-keep]:
        remove_folder(old.path)
    return Checkpoint(target)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((Checkpoint(p) for p in folder.glob("step-[0-9]*") if p.is_dir()), key=lambda c: c.step)


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make `target` with what `write(temporary)` puts there: afterwards it is whole, or as it was before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        remove_folder(target)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Rename aside, then remove: the name never stands for half a folder."""
    if not folder.exists():
        return
    aside = folder.parent / f".{folder.name}.{os.getpid()}.old"
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
