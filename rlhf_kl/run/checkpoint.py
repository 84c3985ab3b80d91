"""Checkpoints: shards of tensors and JSON. A folder named step-000010 was complete when it got its name."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_kl.errors import InputError, blame
from rlhf_kl.run.folder import checkpoint_folders, checkpoint_step, remove_folder, write_folder
from rlhf_kl.sharding import NamedTensors, Read, load_slots, load_tensors

FORMAT = 10  # of the state; raised when older checkpoints cannot be resumed any more
WAY_OUT = "without this folder the checkpoint before is used"
SHARD = 1 << 30  # bytes of tensors in a file; a larger tensor has a file of its own
PARTS = "shard-*.safetensors"  # files of torch's distributed checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: the model, the optimizer, and everything else as JSON."""

    path: Path

    @property
    def step(self) -> int:
        """The last update that it contains."""
        return checkpoint_step(self.path)

    def state(self) -> dict[str, Any]:
        """The JSON part. Errors: InputError if it cannot be read, another version wrote it, or a file is missing."""
        with self._reading():
            state: dict[str, Any] = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        if state.get("format") != FORMAT:
            raise InputError(
                f"{self.path}: written by another version of rlhf-kl, so --resume cannot go on from it: "
                "--overwrite starts anew, another --output-dir keeps it"
            )
        if missing := [name for name in state["files"] if not (self.path / name).is_file()]:
            raise InputError(f"{self.path}: {missing[0]} is missing; {WAY_OUT}")
        return state

    def load_model(self, model: nn.Module) -> None:
        """Load the weights into a module of the same shape, with tied tensors."""
        stored = self._stored("model")
        with blame(str(self.path)):
            load_tensors(model, *stored)

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the optimizer's state; its parameter groups stay unchanged."""
        load_slots(optimizer, *self._stored("optimizer"))

    def _stored(self, stem: str) -> tuple[dict[str, Tensor], Read | None]:
        """Tensors that stay on the disk until they are copied, or what `load_tensors` takes in their place.

        Each process reads alone what it needs of all files, so the number of processes is free. Errors: InputError.
        """
        with self._reading():
            if not list(self.path.glob(PARTS)):
                paths = sorted(self.path.glob(f"{stem}-*.safetensors"))
                return {name: tensor for path in paths for name, tensor in load_file(path).items()}, None

            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
            from torch.distributed.checkpoint.state_dict_loader import load

            stored = HuggingFaceStorageReader(str(self.path))
            found: Iterable[tuple[str, Any]] = stored.read_metadata().state_dict_metadata.items()
            of_stem = [(name.removeprefix(f"{stem}."), each) for name, each in found if name.startswith(f"{stem}.")]
            shapes = {name: torch.empty(x.size, dtype=x.properties.dtype, device="meta") for name, x in of_stem}

        def read(into: dict[str, Tensor]) -> None:
            with self._reading(), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to load in a single process"
                named = {f"{stem}.{name}": tensor for name, tensor in into.items()}
                with own_errors(self.path):
                    load(named, storage_reader=stored, no_dist=True)

        return shapes, read

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{self.path}: cannot be read: {error}; {WAY_OUT}") from None


def save_parts(place: Path, model: NamedTensors, optimizer: NamedTensors, group: Any) -> None:
    """Write what each process of `group` holds of sharded tensors into one folder; all call together.

    Errors: OSError, on all of them, if a disk is full or fails.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{stem}.{n}": x for stem, named in (("model", model), ("optimizer", optimizer)) for n, x in named}
    sizes = accumulate(tensor.nbytes / dist.get_world_size(group) for tensor in tensors.values())
    files = {name: 1 + int(size // SHARD) for name, size in zip(tensors, sizes, strict=True)}
    writer = HuggingFaceStorageWriter(str(place), files, save_distributed=True)
    with own_errors(place):
        save(tensors, storage_writer=writer, process_group=group)


@contextmanager
def own_errors(place: Path) -> Iterator[None]:
    """Raise the first failure inside a distributed checkpoint as the OSError that it was, or as EIO."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        own = failure if isinstance(failure, OSError) and failure.errno else OSError(errno.EIO, str(failure))
        raise OSError(own.errno, own.strerror, str(place)) from error


def save_checkpoint(
    folder: Path,
    step: int,
    model: NamedTensors,
    optimizer: NamedTensors,
    state: Mapping[str, Any],
    parts: Path | None = None,
) -> Checkpoint:
    """Write checkpoint `step` into `folder`. Errors: OSError if the disk is full or fails.

    `model` and `optimizer`: of `tensors_of` and `slots_of`, or with `parts` what `save_parts` wrote there.
    """

    def write(place: Path) -> None:
        if parts is None:
            _write_shards(place / "model", model)
            _write_shards(place / "optimizer", optimizer)
        else:
            for path in parts.iterdir():
                path.rename(place / path.name)
        files = sorted(path.name for path in place.iterdir())
        (place / "state.json").write_text(json.dumps({"format": FORMAT, "files": files, **state}), encoding="utf-8")

    target = folder / f"step-{step:06d}"
    write_folder(target, write)
    return Checkpoint(target)


def _write_shards(stem: Path, tensors: NamedTensors) -> None:
    """Write stem-00001.safetensors and so on; tensors that lie in this process's memory are not copied."""
    shard: dict[str, Tensor] = {}
    size, number = 0, 1
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD:
            save_file(shard, f"{stem}-{number:05d}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    save_file(shard, f"{stem}-{number:05d}.safetensors")


def prune(folder: Path, keep: int, *, every: int = 1, spared: Collection[int] = ()) -> None:
    """Drop old checkpoints.

    It keeps the newest one, the newest `keep` of those at a multiple of `every`, and `spared`. One that a signal or
    the clock made in between replaces none of them, so an interrupted run keeps those of an uninterrupted run.
    """
    present = checkpoints(folder)
    steps = [checkpoint.step for checkpoint in present]
    kept = {*steps[-1:], *[step for step in steps if step % every == 0][-keep:], *spared}
    for old in present:
        if old.step not in kept:
            remove_folder(old.path)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(map(Checkpoint, checkpoint_folders(folder)), key=lambda checkpoint: checkpoint.step)
