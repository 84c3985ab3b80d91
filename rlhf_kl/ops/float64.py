"""Sums in float64, on the CPU where a device has no such numbers."""

from __future__ import annotations

from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}  # types of devices


def float64(x: Tensor) -> Tensor:
    """`x` as float64, of any shape; moved to the CPU from a device that has none."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()
