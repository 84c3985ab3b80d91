"""Checkpoints: safetensors and JSON, complete or absent (`run.folders`).

A folder named step-000010 was complete when it got its name, even if the process was killed; checksums show whether
it still is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_kl.errors import InputError
from rlhf_kl.run.contents import checkpoint_folders
from rlhf_kl.run.folders import damage, remove_folder, write_folder
from rlhf_kl.sharding import load_slots, load_tensors

FORMAT = 6  # of the state; raised when older checkpoints cannot be resumed any more


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: the model, the optimizer, and everything else as JSON."""

    path: Path

    @property
    def step(self) -> int:
        """The last update that it contains."""
        return int(self.path.name.removeprefix("step-"))

    def state(self) -> dict[str, Any]:
        """The JSON part. Errors: InputError if another version of this program wrote it."""
        state: dict[str, Any] = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        if state.get("format") != FORMAT:
            made_by = state.get("environment", {}).get("rlhf_kl", "unnamed")
            raise InputError(
                f"{self.path}: written by another version of rlhf-kl ({made_by}), so --resume cannot go on from it: "
                "--overwrite starts anew, another --output-dir keeps it"
            )
        return state

    def load_model(self, model: nn.Module) -> None:
        """Load the weights into a module of the same shape, with tied tensors."""
        load_tensors(model, load_file(self.path / "model.safetensors"))

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the optimizer's state; its parameter groups stay unchanged."""
        load_slots(optimizer, load_file(self.path / "optimizer.safetensors"))

    def damage(self) -> str | None:
        """The damage to its files; None if they are unchanged."""
        return damage(self.path)


def save_checkpoint(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
    *,
    every: int = 1,
    spared: Collection[int] = (),
) -> Checkpoint:
    """Write checkpoint `step` into `folder`, then `prune`. Errors: OSError if the disk is full or fails.

    `model` and `optimizer`: their tensors, as `tensors_of` and `slots_of` give them.
    """

    def write(place: Path) -> None:
        save_file(dict(model), place / "model.safetensors")
        save_file(dict(optimizer), place / "optimizer.safetensors")
        (place / "state.json").write_text(json.dumps({"format": FORMAT, **state}), encoding="utf-8")

    target = folder / f"step-{step:06d}"
    write_folder(target, write, checksums=True)
    shutil.rmtree(_damaged(target), ignore_errors=True)
    prune(folder, keep, every=every, spared={step, *spared})
    return Checkpoint(target)


def prune(folder: Path, keep: int, *, every: int = 1, spared: Collection[int] = ()) -> None:
    """Drop old checkpoints.

    It keeps the newest one, the newest `keep` of those at a multiple of `every`, and `spared`. One that a signal made
    in between replaces none of them, so an interrupted run keeps the same ones as an uninterrupted run.
    """
    present = checkpoints(folder)
    steps = [checkpoint.step for checkpoint in present]
    kept = {*steps[-1:], *[step for step in steps if step % every == 0][-keep:], *spared}
    for old in present:
        if old.step not in kept:
            remove_folder(old.path)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    present = [Checkpoint(path) for path in checkpoint_folders(folder) if path.is_dir()]
    return sorted(present, key=lambda checkpoint: checkpoint.step)


def newest_whole(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest undamaged checkpoint, and the damage of newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        problem = checkpoint.damage()
        if problem is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.path.name}: {problem}")
    return None, problems


def set_aside(checkpoint: Checkpoint) -> None:
    """Rename a damaged checkpoint, so that it does not count, until its step is written anew."""
    aside = _damaged(checkpoint.path)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.path.rename(aside)


def _damaged(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")
