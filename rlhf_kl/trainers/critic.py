"""Fitting a value function on features: several cheap epochs after those of the policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.seeding import shuffled

MINIBATCHES = 4  # optimizer steps an epoch, on every process alike


def fit_critic(
    critic: FeatureCritic,
    optimizer: torch.optim.Optimizer,
    features: Tensor,
    returns: Tensor,
    *,
    epochs: int,
    seed: int,
    step: int,
    total: Callable[[Tensor], Tensor],
) -> tuple[float, bool]:
    """Least squares of returns (N,) on features (N, F) of this process; `total` sums over processes.

    Returns the mean loss of the first epoch, and whether every gradient was finite; a step whose gradient is not
    is left out.
    """
    first = torch.zeros(2, dtype=torch.float64, device=features.device)
    finite = True
    for epoch in range(epochs):
        order = shuffled(len(features), seed, "critic", step, epoch).to(features.device)
        for picked in order.tensor_split(MINIBATCHES):
            losses = critic.loss(features[picked], returns[picked])
            count = total(torch.tensor(float(len(picked)), device=features.device))
            if not count:
                continue
            optimizer.zero_grad()
            (losses.sum() / count).backward()
            for parameter in critic.parameters():
                if parameter.grad is not None:
                    parameter.grad = total(parameter.grad)
            if all(bool(torch.isfinite(p.grad).all()) for p in critic.parameters() if p.grad is not None):
                optimizer.step()
            else:
                finite = False
            if epoch == 0:
                first += torch.stack([losses.detach().double().sum(), torch.tensor(float(len(picked))).double()])
    optimizer.zero_grad()
    loss, count = total(first).tolist()
    return loss / max(count, 1.0), finite
