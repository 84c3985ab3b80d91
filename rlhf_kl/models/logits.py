"""Logits that are computed one bounded chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}  # float32 logits in one chunk, by device


class Logits:
    """The logits (N, V) at some states, computed in float32 when they are used, a bounded chunk at a time."""

    def __init__(self, head: Callable[[Tensor], Tensor], hidden: Tensor, vocabulary: int) -> None:
        """`head` maps hidden states (n, H) to logits (n, V); `hidden` (N, H)."""
        self.head, self.hidden = head, hidden
        elements = LOGIT_ELEMENTS.get(hidden.device.type, LOGIT_ELEMENTS["cpu"])
        self.rows = max(1, elements // vocabulary)

    def __len__(self) -> int:
        return len(self.hidden)

    def __call__(self, at: slice) -> Tensor:
        """Logits (n, V) of a slice of the states."""
        return self.head(self.hidden[at])

    def map(self, function: Callable[[Tensor, slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """`function(logits (n, V), slice)` for every chunk; its results (n,) come back joined: (N,) each.

        If gradients are enabled and there are several chunks, each is recomputed in the backward pass.
        """
        slices = [slice(start, start + self.rows) for start in range(0, len(self), self.rows)] or [slice(0, 0)]

        def piece(at: slice) -> tuple[Tensor, ...]:
            return function(self(at), at)

        if len(slices) > 1 and torch.is_grad_enabled():
            parts = [checkpoint(partial(piece, at), use_reentrant=False, preserve_rng_state=False) for at in slices]
        else:
            parts = [piece(at) for at in slices]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))
