"""The frozen reference's logits at a rollout's states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.models.actor_critic import read_states
from rlhf_kl.models.prefix_sharing import least_share
from rlhf_kl.ops.packing import Layout, Packed, pass_overhead

KEPT_ELEMENTS = 1 << 24  # logits of a rollout that are kept to the end of its update: 64 MiB in float32
PASS_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}  # logits in one pass, by device; more where the LM head has more


class ReferenceLogits:
    """Computed once a rollout and kept where there is room, else computed anew each time."""

    def __init__(self, model: Any, *, keep: bool = False) -> None:
        self.model, self.keep = model, keep
        shape = model.config.get_text_config()
        self.vocabulary: int = shape.vocab_size
        self.head_elements: int = shape.vocab_size * shape.hidden_size
        self.hear: Callable[[Packed, Tensor], None] | None = (
            None  # told what the LM head read in a rollout's first pass
        )
        self.kept: Tensor | None = None  # (tokens, V)
        self.room = self.filled = 0

    def pass_bounds(self, device: torch.device) -> dict[str, Any]:
        """Limits of one pass over a rollout, as `Layout.passes` takes them.

        A pass reads the LM head's weights whatever its size, so its logits may be as many as those.
        """
        elements = max(PASS_ELEMENTS.get(device.type, PASS_ELEMENTS["cpu"]), self.head_elements)
        return {
            "most_tokens": max(1, elements // self.vocabulary),
            "overhead": pass_overhead(device),
            "least_share": least_share(self.model, device),
        }

    def begin(self, layout: Layout) -> None:
        """A new rollout; forgets the last one."""
        fits = self.keep and layout.tokens * self.vocabulary <= KEPT_ELEMENTS
        self.kept, self.filled, self.room = None, 0, layout.tokens if fits else 0

    @torch.no_grad()
    def __call__(self, packed: Packed) -> Tensor:
        """Logits (N, V) at the states of a pass over the rollout."""
        if self.kept is not None and self.filled == self.room:
            return self.kept.index_select(0, packed.numbers)
        logits, hidden = read_states(self.model, packed.ids, packed.mask, packed.states, packed.prefixes)
        if self.hear is not None:
            self.hear(packed, hidden)
        if self.room:
            if self.kept is None:
                self.kept = logits.new_empty(self.room, logits.shape[1])
            self.kept[packed.numbers] = logits
            self.filled += len(logits)
        return logits
