"""A value function on features of a state from frozen models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf_kl.seeding import generator

WIDTH = 128


class FeatureCritic(nn.Module):
    """A small network that predicts the final score from frozen features of a state.

    The features never change, so they are computed once per rollout, and fitting costs little compared with an epoch
    of the policy. The policy gets no gradient from the value. Initially it predicts `mean`, the mean score of the
    reference, everywhere; it learns in units of `scale`.
    """

    def __init__(self, size: int, mean: float, scale: float, seed: int) -> None:
        """`size`: features of a state. `mean` and `scale`: of the reference's shaped scores."""
        super().__init__()
        self.size, self.mean, self.scale = size, mean, scale
        self.inner, self.outer = nn.Linear(size, WIDTH), nn.Linear(WIDTH, 1)
        noise = generator(seed, "critic")  # the global generator is not used
        with torch.no_grad():
            self.inner.weight.normal_(0.0, size**-0.5, generator=noise)
            for zero in (self.inner.bias, self.outer.weight, self.outer.bias):
                zero.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Features (N, F) -> values (N,) float32."""
        values: Tensor = self.outer(nn.functional.gelu(self.inner(features))).squeeze(-1)
        return self.mean + self.scale * values

    def loss(self, features: Tensor, returns: Tensor) -> Tensor:
        """Squared errors (N,) in units of the scale, for features (N, F) and returns (N,)."""
        errors: Tensor = (self(features) - returns) / self.scale
        return errors.square()
