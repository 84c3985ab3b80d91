"""Advantage estimators: rewards and values in, advantages and returns out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# rewards, values, mask (B, T), gamma, lam -> advantages and returns (B, T), zeros outside of the mask
Estimator = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, T), zeros outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, with V = A = 0 after the last
    token of a row; returns = A + V. All inputs (B, T); the mask is a run of True from the left.
    Source: Schulman et al. 2016 (1506.02438), equation 16.
    """
    live = mask.to(values.dtype)
    values, rewards = values * live, rewards * live
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * live[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values) * live


ESTIMATORS: dict[str, Estimator] = {"gae": gae}
