"""The way from the reference to the policy: theta_ref + s (theta - theta_ref), along which the KL falls to 0.

It is known only where the policy began as its reference. Weights of the same names and shapes do not say so: half of
the way between two of them may be noise, as where one has the units of the other in another order.
(Interpolation towards the start: Rame et al. 2024, WARP, 2406.16768, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Line:
    """A straight line of tensors: theta = origin + share (end - origin), where they began at `end`."""

    parameters: Sequence[Tensor]
    origin: Sequence[Tensor]
    share: float = 1.0

    @torch.no_grad()
    def go(self, share: float) -> None:
        """Move the tensors to this share of the way; from the origin there is no way back."""
        step, self.share = (share / self.share if share else 0.0), share
        for p, a in zip(self.parameters, self.origin, strict=True):
            p.copy_(torch.lerp(a.to(p), p, step) if step else a.to(p))  # theta may not be finite


@dataclass(frozen=True)
class Way:
    """The tensors of a policy that are scaled, and their values at the reference."""

    parameters: Sequence[Tensor]  # what this process holds of them
    origin: Callable[[], Sequence[Tensor]]

    def line(self) -> Line:
        """The line on which the tensors are now; all processes call it."""
        return Line(self.parameters, self.origin())
