"""Detects non-finite numbers and full memory before they damage a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_kl.errors import MemoryFull
from rlhf_kl.memory import free_cached_memory, memory_is_full

Result = TypeVar("Result")
SMALLER_PASS = "shorter rows, an adapter (policy.lora={}) or policy.gradient_checkpointing=true need less"


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; one transfer from the device for all tensors."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors]
    return bool(torch.stack(flags).all()) if flags else True


class Microbatch:
    """Rows in one forward and backward pass: halved, for the rest of the run, if they do not fit into memory."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.halved: int | None = None  # rows after halving; None = never halved
        self.largest: int | None = None  # rows in the largest pass of the attempt, if it reports them

    def tries(self, rows: int) -> None:
        """A pass of the attempt has `rows` rows."""
        self.largest = max(rows, self.largest or 0)

    def halve_to(self, rows: int | None) -> None:
        """Take over the `halved` of an earlier part of the run."""
        if rows is not None and rows < self.rows:
            self.rows = self.halved = rows

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"halved": self.halved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.halve_to(state["halved"])

    def fit(self, attempt: Callable[[int], Result], undo: Callable[[], None]) -> Result:
        """`attempt(rows)`, again with half the rows after `undo()` as long as memory is full.

        Errors: MemoryFull where a single row does not fit.
        """
        while True:
            self.largest = None
            try:
                return attempt(self.rows)
            except Exception as error:
                if not memory_is_full(error):
                    raise
                tried = min(self.rows, self.largest or self.rows)
                if tried == 1:
                    raise MemoryFull("memory is full: a training pass of one row does not fit", SMALLER_PASS) from error
            # Out of the handler, which holds the failed pass's tensors.
            undo()
            free_cached_memory()
            self.halve_to(tried // 2)
