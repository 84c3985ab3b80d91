"""Fitting a value function on features: several cheap epochs after those of the policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.processes import Processes
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
    processes: Processes,
) -> tuple[float, bool]:
    """Least squares of returns (N,) on features (N, F) of this process, in minibatches of those of all processes.

    Returns the mean loss of the first epoch, and whether every loss was finite. Skips steps with a non-finite loss.
    """
    first = torch.zeros(2, dtype=torch.float64)  # of the first epoch: the summed loss, and of how many
    finite = True
    sizes = processes.all(len(features))
    begin = sum(sizes[: processes.index])
    for epoch in range(epochs):
        order = shuffled(sum(sizes), seed, "critic", step, epoch)
        for rows in order.tensor_split(MINIBATCHES):
            if not len(rows):
                continue
            picked = (rows[(rows >= begin) & (rows < begin + len(features))] - begin).to(features.device)
            loss = critic.loss(features.index_select(0, picked), returns.index_select(0, picked)).sum()
            (loss / len(rows)).backward()
            here = float(loss.detach())
            if epoch == 0:
                first += torch.tensor([here, len(picked)], dtype=torch.float64)
            if math.isfinite(processes.sum_gradients(critic.parameters(), here)):
                optimizer.step()
            else:
                finite = False
            optimizer.zero_grad()
    summed, tokens = processes.sum(first).tolist()
    return summed / max(tokens, 1.0), finite
