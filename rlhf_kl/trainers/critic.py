"""Fitting a value function on features: several cheap epochs after those of the policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf_kl.distributed import Ranks
from rlhf_kl.models.value import FeatureCritic
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
    ranks: Ranks,
) -> tuple[float, bool]:
    """Least squares of returns (N,) on features (N, F) of this process, in minibatches of those of all processes.

    Returns the mean loss of the first epoch, and whether every gradient was finite; steps without are left out.
    """
    first = torch.zeros(2, dtype=torch.float64)  # of the first epoch: the summed loss, and of how many
    finite = True
    sizes = ranks.all(len(features))
    begin = sum(sizes[: ranks.index])
    for epoch in range(epochs):
        order = shuffled(sum(sizes), seed, "critic", step, epoch)
        for rows in order.tensor_split(MINIBATCHES):
            if not len(rows):
                continue
            picked = (rows[(rows >= begin) & (rows < begin + len(features))] - begin).to(features.device)
            loss = critic.loss(features.index_select(0, picked), returns.index_select(0, picked)).sum()
            (loss / len(rows)).backward()
            if epoch == 0:
                first += torch.tensor([float(loss.detach()), len(picked)], dtype=torch.float64)
            finite &= math.isfinite(ranks.step(optimizer, critic.parameters()))
    summed, tokens = ranks.sum(first).tolist()
    return summed / max(tokens, 1.0), finite
