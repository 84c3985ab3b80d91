"""Checkpoints: safetensors and JSON, whole or not there at all.

A checkpoint is written under a temporary name, synced and renamed; an old one is renamed aside and then
removed. A folder named step-000010 was therefore complete when it got its name, whatever happened to the
process; checksums tell whether it still is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from rlhf_kl.run.folders import damage, remove_folder, write_folder
from rlhf_kl.run.run_folder import CHECKPOINT


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
    found = [Checkpoint(path) for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, for safetensors."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": torch.as_tensor(value) for index, slot in state.items() for name, value in slot.items()}


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The reverse of `optimizer_tensors`; the parameter groups stay as built."""
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        slots.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
