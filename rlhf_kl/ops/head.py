"""From hidden states to figures of tokens: logits exist for one bounded chunk of tokens at a time.

A chunk's logits become log-probs and KLs at once. With gradients and several chunks, they are computed again in the
backward pass, as in fused linear cross-entropies (Hsu et al. 2024, Liger Kernel, 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_kl.ops.logprobs import TokenStats, chosen_logprobs, compare_distributions, logprobs_and_kl

LOGIT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}  # float32 logits in one chunk, by device; a CPU has more
PER_PARAMETER = 0.5  # for each parameter of the model, up to what a GPU has: half the memory of its float32 weights


class Head(NamedTuple):
    """What makes logits of hidden states: (n, H) -> (n, V) float32, up to a shift in each row."""

    logits: Callable[[Tensor], Tensor]
    vocabulary: int
    parameters: int = 0  # of the model

    def chunk(self, device: torch.device, *, grows: bool = True) -> int:
        """Tokens whose logits may exist at once.

        `grows`: with the model. In one chunk nothing is computed again for the backward pass; without one, smaller
        chunks cost nothing.
        """
        least, most = LOGIT_ELEMENTS.get(device.type, LOGIT_ELEMENTS["cpu"]), max(LOGIT_ELEMENTS.values())
        elements = max(least, min(most, int(PER_PARAMETER * self.parameters))) if grows else least
        return max(1, elements // self.vocabulary)

    def of_logits(self) -> Head:
        """The head of states that are logits already."""
        return self._replace(logits=lambda logits: logits)


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]], head: Head, hidden: Tensor, *columns: Tensor
) -> tuple[Tensor, ...]:
    """`function(hidden (n, H), *columns (n, ...))` for every chunk of the N tokens; its results joined: (N,) each.

    A chunk has as many tokens as there may be logits of `head`.
    """
    size = head.chunk(hidden.device, grows=torch.is_grad_enabled())
    if len(hidden) <= size:
        return function(hidden, *columns)
    pieces = zip(*(x.split(size) for x in (hidden, *columns)), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(function, *rows, use_reentrant=False, preserve_rng_state=False) for rows in pieces]
    else:
        parts = [function(*rows) for rows in pieces]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def token_logprobs(hidden: Tensor, head: Head, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(id) (N,) at hidden states (N, H), sampling temperature included, with gradients."""

    def chosen(hidden: Tensor, ids: Tensor) -> tuple[Tensor]:
        return (chosen_logprobs(head.logits(hidden), ids, temperature),)

    return in_chunks(chosen, head, hidden, ids)[0]


def token_kl(
    hidden: Tensor, head: Head, ids: Tensor, ref: Tensor, ref_head: Head, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the exact KL to the reference (N,) in nats; `ref` (N, H): its hidden states there."""

    def both(hidden: Tensor, ids: Tensor, ref: Tensor) -> tuple[Tensor, ...]:
        logits = head.logits(hidden)
        with torch.no_grad():
            ref_logits = ref_head.logits(ref)
        return logprobs_and_kl(logits, ref_logits, ids, temperature)

    logprobs, kl = in_chunks(both, head, hidden, ids, ref)
    return logprobs, kl


@torch.no_grad()
def token_stats(hidden: Tensor, head: Head, ids: Tensor, ref: Tensor, ref_head: Head, temperature: float) -> TokenStats:
    """What `compare_distributions` tells of N tokens, without gradients."""

    def compare(hidden: Tensor, ids: Tensor, ref: Tensor) -> TokenStats:
        return compare_distributions(head.logits(hidden), ref_head.logits(ref), ids, temperature)

    return TokenStats(*in_chunks(compare, head, hidden, ids, ref))
