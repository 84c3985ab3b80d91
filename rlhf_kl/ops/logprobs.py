"""Log-probabilities of chosen tokens, and what two full distributions say about each other.

Everything is computed in float32 whatever the dtype of the logits, in chunks of positions, so that the
float32 working memory does not grow with batch times length times vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # float32 numbers in one temporary: 64 MiB


class TokenDistributions(NamedTuple):
    """What the distributions of policy and reference say at each response position; every field (B, T)."""

    logprobs: Tensor
    ref_logprobs: Tensor
    exact_kl: Tensor
    entropy: Tensor


def chosen_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(id) for `logits` (..., V) and `ids` (...), sampling temperature included: (...) float32.

    logsumexp and gather: no second tensor of the size of the logits is kept.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(pi || ref) over the whole vocabulary for logits (..., V): (...), in nats, never negative.

    sum over v of pi(v) (log pi(v) - log ref(v)); differentiable in both arguments.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    ref_logp = torch.log_softmax(ref_logits.float() / temperature, -1)
    # A forbidden token (logit -inf in both) has probability 0 and adds nothing; inf - inf would be NaN, in the
    # gradient too if it were only masked after the product.
    gap = (logp - ref_logp).masked_fill(logp == -torch.inf, 0.0)
    return (logp.exp() * gap).sum(-1).clamp_min(0.0)


def compare_distributions(
    logits: Tensor, ref_logits: Tensor, ids: Tensor, temperature: float = 1.0
) -> TokenDistributions:
    """Log-probs of `ids` (B, T) under both, exact KL and entropy of the policy, from logits (B, T, V)."""
    vocabulary = logits.shape[-1]
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    flat, ref_flat, flat_ids = (
        logits.reshape(-1, vocabulary),
        ref_logits.reshape(-1, vocabulary),
        ids.reshape(-1),
    )
    parts = []
    for start in range(0, len(flat_ids), rows):
        piece = slice(start, start + rows)
        logp = torch.log_softmax(flat[piece].float() / temperature, -1)
        ref_logp = torch.log_softmax(ref_flat[piece].float() / temperature, -1)
        chosen = flat_ids[piece].unsqueeze(-1)
        p = logp.exp()
        zero = torch.zeros_like(p)
        impossible = logp == -torch.inf
        kl = torch.where(impossible, zero, p * (logp - ref_logp)).sum(-1).clamp_min(0.0)
        entropy = -torch.where(impossible, zero, p * logp).sum(-1)
        parts.append((logp.gather(-1, chosen)[:, 0], ref_logp.gather(-1, chosen)[:, 0], kl, entropy))
    return TokenDistributions(*(torch.cat(column).view(ids.shape) for column in zip(*parts, strict=True)))
