"""How a run's checkpoints come onto the disk: at once, or from a copy while the next update computes."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.config.schema.sections import CheckpointSection
from rlhf_kl.distributed import Ranks
from rlhf_kl.memory import free_memory
from rlhf_kl.run.checkpoint import prune, save_checkpoint, save_parts
from rlhf_kl.sharding import NamedTensors, is_sharded, local, parts_of, slots_of

ROOM = 2  # times the copy must be free in the host's memory


class Saving:
    """The checkpoints of one run; at most one is being written. All ranks call `save` and `settle` together."""

    def __init__(self, folder: Path, section: CheckpointSection, ranks: Ranks) -> None:
        self.folder, self.section, self.ranks = folder, section, ranks
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._work: Future[None] | None = None  # of the thread, until it is settled

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Write checkpoint `step` and drop old ones, or begin to. `state`: what it holds beside tensors, as JSON.

        Errors: OSError if the disk is full or fails, also where it was for the checkpoint before.
        """
        self.settle()
        sharded = any(map(is_sharded, model.parameters()))
        write, named = partial(self._write, step, sharded), (parts_of(model), slots_of(optimizer))
        if self._copies(model, optimizer):
            mine = sharded or self.ranks.writes
            copies = self.ranks.run(lambda: [copied(tensors) for tensors in named if mine])
            self._work = self._thread.submit(write, copy.deepcopy(state), *copies)
        else:
            self.ranks.run(lambda: write(state, *named))  # all wait until it is complete

    def _copies(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        if self.section.background != "auto":
            return self.section.background
        tensors = [tensor for _, tensor in (*parts_of(model), *slots_of(optimizer))]
        return all(self.ranks.all(is_worth_copying(tensors)))

    def _write(
        self, step: int, sharded: bool, state: Mapping[str, Any], model: NamedTensors = (), slots: NamedTensors = ()
    ) -> None:
        parts = self.folder / f".parts.{step}.tmp" if sharded else None
        try:
            if parts is not None:
                save_parts(parts, model, slots, self.ranks.writing)
            if self.ranks.writes:
                save_checkpoint(self.folder, step, model, slots, state, parts)
                self.prune(state)
        finally:
            if parts is not None and self.ranks.writes:
                shutil.rmtree(parts, ignore_errors=True)

    def prune(self, state: Mapping[str, Any]) -> None:
        """Drop old checkpoints; `state`: of the newest."""
        prune(self.folder, self.section.keep, every=state["every"], spared=state["spared"])

    def settle(self, *, waits: bool = True) -> None:
        """Wait until the checkpoint is complete; without `waits` only see whether it is. Errors: those of `save`."""
        work = self._work
        if work is not None and (waits or all(self.ranks.all(work.done()))):
            self.ranks.run(work.result)
            self._work = None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until this rank writes nothing any more, whatever came of it, or so long."""
        if self._work is not None:
            wait([self._work], seconds)

    def close(self, call: Callable[[], None]) -> None:
        """Nothing follows. `call` this when this rank writes nothing any more: now, or in the thread."""
        self._thread.shutdown(wait=self._work is None or self._work.done())
        if self._work is None:
            call()
        else:
            self._work.add_done_callback(lambda _: call())


def copied(tensors: NamedTensors) -> list[tuple[str, Tensor]]:
    """Copies in the host's memory; of sharded tensors, of this rank's part."""
    return [(name, tensor.to("cpu", copy=True)) for name, tensor in tensors]


def is_worth_copying(tensors: Iterable[Tensor]) -> bool:
    """Whether these tensors lie on a GPU, and the host's memory has room for a copy of this rank's part of them."""
    own = [local(tensor) for tensor in tensors]
    on_gpu = any(tensor.device.type != "cpu" for tensor in own)
    return on_gpu and ROOM * sum(tensor.nbytes for tensor in own) < free_memory(torch.device("cpu"))
