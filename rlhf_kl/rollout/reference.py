"""The frozen reference at a rollout's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhf_kl.models.lm import LM
from rlhf_kl.models.logits import Logits
from rlhf_kl.ops.packing import Layout, Packed

PASS_ROWS = 64  # in one pass without gradients
PASS_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 16}


def reading_passes(layout: Layout, rows: Sequence[int] | None = None) -> Iterator[Packed]:
    """Rows of a batch (default: all) in passes without gradients."""
    tokens = PASS_TOKENS.get(layout.device.type, PASS_TOKENS["cpu"])
    chosen = range(len(layout.lengths)) if rows is None else rows
    return layout.passes(chosen, most_rows=PASS_ROWS, most_tokens=tokens)


class ReferenceStates:
    """The reference's last hidden states at a rollout's states, computed once.

    From them the logits cost only one pass of the head, for each use: the exact KL of a rollout, the KL in the
    loss, and the ceiling.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.hidden = torch.empty(0)  # (tokens, H)

    @torch.no_grad()
    def read(self, layout: Layout) -> None:
        """Start a new rollout; drops the last one."""
        self.hidden = torch.empty(0)
        for rows in reading_passes(layout):
            hidden = self.lm.hidden(rows)
            if not len(self.hidden):
                self.hidden = hidden.new_empty(layout.tokens, hidden.shape[1])
            self.hidden[rows.numbers] = hidden

    @torch.no_grad()
    def logits(self, numbers: Tensor) -> Tensor:
        """Logits (n, V) of some of the rollout's response tokens, by number (n,): as many as one chunk holds."""
        logits: Logits = self.lm.logits(self.hidden.index_select(0, numbers))
        return logits(slice(None))
