"""Seeds for every source of randomness, made from the run's seed and what the numbers are for.

Nothing draws from a shared stream: the numbers of step 17 are the same whether or not steps 1 to 16 ran in
this process, and the same on any number of processes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on all of its arguments and nothing else."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def uniforms(rows: int, columns: int, seed: int, *purpose: str | int) -> Tensor:
    """(rows, columns) numbers in [0, 1): the sampling noise of a global batch, of which a process takes its rows."""
    return torch.rand(rows, columns, generator=generator(seed, *purpose), dtype=torch.float64)


def shuffled(size: int, seed: int, *purpose: str | int) -> Tensor:
    """A permutation (size,) of range(size)."""
    return torch.randperm(size, generator=generator(seed, *purpose))
