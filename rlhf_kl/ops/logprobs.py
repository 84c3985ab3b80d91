"""Log-probabilities of chosen tokens, and the KL of two full distributions.

Everything is computed in float32 for any dtype of the logits, in chunks of positions, so that the
float32 working memory does not grow with batch times length times vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 17  # float32 numbers in one temporary: 512 KiB, which fits into a core's cache
DEVICE_CHUNKS = 256  # chunks at once on a GPU, where each launch has a cost


class TokenStats(NamedTuple):
    """Figures of the policy's and the reference's distributions at each response position; every field (B, T)."""

    logprobs: Tensor
    ref_logprobs: Tensor
    exact_kl: Tensor
    entropy: Tensor
    k1_variance: Tensor  # of log pi - log ref of a token drawn from the policy, nats squared; its mean is the exact KL
    logprob_variance: Tensor  # of log pi of such a token; its mean is minus the entropy


class _ChosenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[id] that stores only the logits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        out = torch.empty(len(ids), dtype=torch.float32, device=logits.device)
        for piece in _chunks(logits):
            logp = torch.log_softmax(_scaled(logits[piece], temperature), -1)
            out[piece] = logp.gather(-1, ids[piece].unsqueeze(-1)).squeeze(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, None]:
        logits, ids = ctx.saved_tensors
        scale = (grad_out / ctx.temperature).unsqueeze(-1)
        grad = torch.empty_like(logits)
        for piece in _chunks(logits):
            x = _scaled(logits[piece], ctx.temperature)
            target = grad[piece]
            p = torch.softmax(x, -1, out=target) if grad.dtype == torch.float32 else torch.softmax(x, -1)
            p.mul_(-scale[piece]).scatter_add_(-1, ids[piece].unsqueeze(-1), scale[piece])
            if p is not target:
                target.copy_(p)
        return grad, None, None


def chosen_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(id) for `logits` (..., V) and `ids` (...), sampling temperature included: (...) float32."""
    flat: Tensor = _ChosenLogprobs.apply(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1), temperature)
    return flat.view(ids.shape)


def exact_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(pi || ref) over the whole vocabulary for logits (..., V): (...) float32, in nats, never negative.

    sum over v of pi(v) (log pi(v) - log ref(v)); differentiable in both arguments, once. Log-probabilities are logits
    too; probabilities are none. Raises ValueError for two shapes.
    """
    if logits.shape != ref_logits.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and ref_logits {tuple(ref_logits.shape)} differ in shape")
    ids = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return logprobs_and_kl(logits, ref_logits, ids, temperature)[1]


def logprobs_and_kl(logits: Tensor, ref_logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`chosen_logprobs` and `exact_kl` from one softmax: (...) float32 each.

    Forward and backward process the positions in chunks, and store only the logits between them.
    """
    flat = (x.reshape(-1, x.shape[-1]) for x in (logits, ref_logits))
    logprobs, kl = _LogprobsAndKL.apply(*flat, ids.reshape(-1), temperature)
    return logprobs.view(ids.shape), kl.view(ids.shape)


class _LogprobsAndKL(torch.autograd.Function):
    """Rows of (N, V). With gap = log p - log q: dKL/dlogits = p (gap - KL), dKL/dref_logits = q - p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, ref_logits, ids)
        ctx.temperature = temperature
        logprobs, kl = logits.new_empty(2, len(ids), dtype=torch.float32)
        for rows in _chunks(logits):
            logp = torch.log_softmax(_scaled(logits[rows], temperature), -1)
            ref_logp = torch.log_softmax(_scaled(ref_logits[rows], temperature), -1)
            logprobs[rows] = logp.gather(-1, ids[rows].unsqueeze(-1))[:, 0]
            kl[rows] = _weighted(logp.exp(), logp - ref_logp, logp)[0].clamp_min(0.0)
        return logprobs, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, kl_grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        logits, ref_logits, ids = ctx.saved_tensors  # once: if a chunk is recomputed, a second read is an error
        wanted = ctx.needs_input_grad
        grads = [torch.empty_like(x) if want else None for x, want in zip((logits, ref_logits), wanted, strict=False)]
        grad, kl_grad = ((x / ctx.temperature).unsqueeze(-1) for x in (grad, kl_grad))
        for rows in _chunks(logits):
            logp = torch.log_softmax(_scaled(logits[rows], ctx.temperature), -1)
            ref_logp = torch.log_softmax(_scaled(ref_logits[rows], ctx.temperature), -1)
            p = logp.exp()
            weight = kl_grad[rows]
            if grads[1] is not None:
                grads[1][rows] = (weight * (ref_logp.exp() - p)).to(ref_logits.dtype)
            if grads[0] is not None:
                kl, _, product = _weighted(p, logp - ref_logp, logp)
                own = weight * kl.clamp_min_(0.0).unsqueeze(-1) + grad[rows]
                change = product.mul_(weight).addcmul_(p, own, value=-1)
                grads[0][rows] = change.scatter_add_(-1, ids[rows].unsqueeze(-1), grad[rows]).to(logits.dtype)
        return grads[0], grads[1], None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of (N, V) whose float32 copies stay within a fixed size; one where there is no row."""
    elements = CHUNK_ELEMENTS * (1 if logits.device.type == "cpu" else DEVICE_CHUNKS)
    rows = max(1, elements // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, max(1, len(logits)), rows))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """In float32, divided by the temperature; no copy if neither changes anything."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def _moments(p: Tensor, x: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (N,) of x (N, V) under p."""
    mean, x, product = _weighted(p, x, logp)
    return mean, (product.mul_(x).sum(-1) - mean.square()).clamp_min_(0.0)


def _weighted(p: Tensor, x: Tensor, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (N,) of x (N, V) under p, and x and p x; a forbidden token (log p = -inf) is 0, where 0 * inf would be NaN.

    Forbidden tokens are rare: on a CPU they are looked for only if the plain sum fails.
    """
    if p.device.type == "cpu":
        product = p * x
        mean = product.sum(-1)
        if not mean.isnan().any():
            return mean, x, product
    x = x.masked_fill(logp == -torch.inf, 0.0)
    product = p * x
    return product.sum(-1), x, product


def compare_distributions(logits: Tensor, ref_logits: Tensor, ids: Tensor, temperature: float = 1.0) -> TokenStats:
    """Log-probs of `ids` (B, T) under both; exact KL, entropy and variances of the policy; from logits (B, T, V)."""
    flat, ref_flat = (x.reshape(-1, x.shape[-1]) for x in (logits, ref_logits))
    flat_ids = ids.reshape(-1, 1)
    parts = []
    for rows in _chunks(flat):
        logp = torch.log_softmax(_scaled(flat[rows], temperature), -1)
        ref_logp = torch.log_softmax(_scaled(ref_flat[rows], temperature), -1)
        p = logp.exp()
        chosen = flat_ids[rows]
        kl, k1_variance = _moments(p, logp - ref_logp, logp)
        mean, logprob_variance = _moments(p, logp, logp)
        both = (x.gather(-1, chosen)[:, 0] for x in (logp, ref_logp))
        parts.append((*both, kl.clamp_min(0.0), -mean, k1_variance, logprob_variance))
    columns = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return TokenStats(*(column.view(ids.shape) for column in columns))
