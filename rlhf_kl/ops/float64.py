"""Sums in float64, on the CPU if a device does not support it."""

from __future__ import annotations

from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # device types


def float64(x: Tensor) -> Tensor:
    """`x` (any shape) as float64; moved to the CPU from a device without float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()
