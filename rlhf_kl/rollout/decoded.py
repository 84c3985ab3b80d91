"""What the policy said while it sampled, kept so that scoring need not ask it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.models.actor_critic import ActorCritic, StateOutput
from rlhf_kl.ops.packing import Layout, Packed

DECODING_AGREES = 1e-4  # largest difference of a log-prob in nats, float32, to that of a pass over whole rows


class DecodedStates:
    """Logits and what the LM head read, of every state that a response token was drawn from."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []  # (b,) each, one a decoding step
        self.logits: list[Tensor] = []  # (b, V)
        self.hidden: list[Tensor] = []  # (b, H)

    @contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """Catch what the LM head reads while `model` decodes."""

        def catch(_head: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.hidden.append(args[0][:, -1])

        with model.get_output_embeddings().register_forward_pre_hook(catch):
            yield

    def add(self, rows: Tensor, logits: Tensor, hidden: Tensor | None) -> None:
        """One decoding step: the rows (b,) that were in the batch, their logits (b, V), and unless it was caught what
        the LM head read (b, H).
        """
        self.rows.append(rows)
        self.logits.append(logits)
        if hidden is not None:
            self.hidden.append(hidden)

    def settle(self, layout: Layout) -> None:
        """All steps as one tensor, in the order of the layout's response tokens; the rest is dropped."""
        device = layout.ids.device
        rows = torch.cat(self.rows)
        steps = torch.repeat_interleave(torch.arange(len(self.rows)), torch.tensor([len(x) for x in self.rows]))
        live = steps.to(device) < layout.responses.to(device)[rows]
        numbers = (layout.first.to(device)[rows] + steps.to(device))[live]
        order = torch.empty_like(numbers)
        order[numbers] = live.nonzero().squeeze(1)
        self.logits = [torch.cat(self.logits).index_select(0, order)]
        self.hidden = [torch.cat(self.hidden).index_select(0, order)]

    def output(self, model: ActorCritic, packed: Packed) -> StateOutput:
        """What `model` would say of a pass over the rollout, without its policy's part of the work."""
        logits, hidden = (x[0].index_select(0, packed.numbers) for x in (self.logits, self.hidden))
        return StateOutput(logits, model.values(packed.ids, packed.mask, packed.states, hidden, packed.prefixes))
