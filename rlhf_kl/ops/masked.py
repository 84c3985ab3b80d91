"""Means and whitening over the tokens that a mask selects.

In every mask, True = a token that the policy chose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_kl.ops.float64 import float64

Reduce = Callable[[Tensor], Tensor]


def _local(x: Tensor) -> Tensor:
    return x


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` (B, T) where `mask` (B, T); a NaN outside the mask does not leak in."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_mean(x: Tensor, mask: Tensor, *, reduce: Reduce = _local) -> Tensor:
    """Token-weighted mean of `x` (B, T) over `mask` (B, T), a scalar; NaN where the mask is empty.

    `reduce` sums a tensor over all processes, so that the mean is that of the global batch.
    """
    totals = reduce(torch.stack([float64(masked_sum(x, mask)), float64(mask.sum())]))
    return (totals[0] / totals[1]).to(x)


def masked_std(x: Tensor, mask: Tensor, *, reduce: Reduce = _local) -> Tensor:
    """Standard deviation (population) of `x` (B, T) over `mask` (B, T), a scalar."""
    mean = masked_mean(x, mask, reduce=reduce)
    return masked_mean((x - mean) ** 2, mask, reduce=reduce).sqrt()


def whiten(x: Tensor, mask: Tensor, *, center: bool = True, reduce: Reduce = _local) -> tuple[Tensor, Tensor]:
    """Scale `x` (B, T) to unit standard deviation over `mask`, by default with its mean subtracted.

    Returns (whitened (B, T) with zeros outside the mask, the standard deviation it was divided by).
    Source: Huang et al. 2022, "The 37 implementation details of PPO", detail 7.
    """
    std = masked_std(x, mask, reduce=reduce).clamp_min(1e-8)
    shifted = x - masked_mean(x, mask, reduce=reduce) if center else x
    return torch.where(mask, shifted / std, torch.zeros_like(x)), std
