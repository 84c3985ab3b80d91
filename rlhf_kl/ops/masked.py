"""Means and whitening over the tokens that a mask selects, and sums in float64.

In every mask, True = a token that the policy chose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # device types


def float64(x: Tensor) -> Tensor:
    """`x` (any shape) as float64; moved to the CPU from a device without float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` (B, T) where `mask` (B, T); a NaN outside the mask does not leak in."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Token-weighted mean of `x` (B, T) over `mask` (B, T), a scalar; NaN where the mask is empty."""
    return (float64(masked_sum(x, mask)) / float64(mask.sum())).to(x)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Variance (population) of `x` (B, T) over `mask` (B, T), a scalar."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def masked_std(x: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation (population) of `x` (B, T) over `mask` (B, T), a scalar."""
    return masked_variance(x, mask).sqrt()


class Mean(NamedTuple):
    """A mean and its standard error; 0 for a single draw."""

    mean: float
    stderr: float


def mean_of_groups(sums: Tensor, sizes: Tensor, group: int = 1) -> Mean:
    """Sum of `sums` (B,) over that of `sizes` (B,): a ratio estimator.

    Groups of `group` neighbours are the independent draws: the responses to one prompt are alike. In a single group
    the responses are.
    """
    group = 1 if group == len(sums) else group
    sums = float64(sums).view(-1, group).sum(1)
    sizes = float64(sizes).view(-1, group).sum(1)
    total = sizes.sum()
    mean = sums.sum() / total
    draws = len(sums)
    residual = (sums - mean * sizes).square().sum() * draws / max(1, draws - 1)
    return Mean(float(mean), float(residual.sqrt() / total))


def whiten(x: Tensor, mask: Tensor, *, center: bool = True) -> tuple[Tensor, Tensor]:
    """Scale `x` (B, T) to unit standard deviation over `mask`, by default with its mean subtracted.

    Returns (whitened (B, T) with zeros outside the mask, the standard deviation it was divided by).
    Source: Huang et al. 2022, "The 37 implementation details of PPO", detail 7.
    """
    std = masked_std(x, mask).clamp_min(1e-8)
    shifted = x - masked_mean(x, mask) if center else x
    return torch.where(mask, shifted / std, torch.zeros_like(x)), std


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite; if so, with few operations and one transfer from the device."""
    every = list(tensors)
    norms = torch.stack(torch._foreach_norm(every)) if every else torch.zeros(0)  # of each tensor
    return bool(norms.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in every)


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation of two (N,); None if one of them is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-12 else None
