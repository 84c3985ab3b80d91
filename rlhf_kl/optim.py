"""AdamW and the learning-rate schedules that all trainers share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.distributed import Ranks
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.ops.masked import float64
from rlhf_kl.seeding import shuffled

FUSED = ("cpu", "cuda")  # devices for which torch has AdamW in one kernel
CONSTANT = "constant_rate"  # marks a group of tensors whose learning rate follows no schedule
BUILT_IN_SIZE, BUILT_IN_RATE = 890_208, 2.0e-4  # parameters of the built-in policy, and its tuned rate
LARGEST_RATE = 5.0e-4
ADAPTER_FACTOR = 10.0


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    critic: nn.Module | None = None,
    critic_rate: float = 0.0,
    *,
    value: nn.Module | None = None,
) -> torch.optim.AdamW:
    """AdamW over the trainable tensors, eps 1e-5 (Huang et al. 2022, detail 3); no decay on vectors.

    `value` has the settings of the model. `critic`, which may be a part of it, has the constant rate `critic_rate`.
    """
    apart = {id(p) for p in critic.parameters()} if critic is not None else set()
    groups: list[dict[str, Any]] = []
    for module in [model, *([value] if value is not None else [])]:
        # In groups of their own: a step takes either whole tensors or parts of spread ones.
        new = [p for p in module.parameters() if p.requires_grad and id(p) not in apart]
        groups.append({"params": [p for p in new if p.dim() >= 2], "weight_decay": weight_decay})
        groups.append({"params": [p for p in new if p.dim() < 2], "weight_decay": 0.0})
    if critic is not None:
        groups.append({"params": list(critic.parameters()), "weight_decay": 0.0, "lr": critic_rate, CONSTANT: True})
    # One kernel for each tensor, a quarter of the time of the foreach path on a CPU; the same numbers every time.
    fused = all(p.device.type in FUSED for group in groups for p in group["params"])
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, eps=1e-5, fused=fused, foreach=not fused)
    # Before the first gradients: amid them, the moments would break up the memory that gradients use again.
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        count = torch.zeros((), device=parameter.device if fused else "cpu")
        optimizer.state[parameter] = {"step": count, **moments}
    return optimizer


def usual_learning_rate(parameters: int, *, adapter: bool) -> float:
    """Learning rate of PPO for a policy of this many parameters, to two digits.

    It falls with the size to the power 0.6, fitted to rates in common use: 2e-4 at 0.9M (the built-in policy),
    1.4e-5 at 124M (TRL, GPT-2), 3e-6 at 1B (Huang et al. 2024, 2403.17031), 5e-7 to 1e-6 at 7B (OpenRLHF, verl).
    It is at most 5e-4, for smaller policies than those that were tried. An adapter takes ten times as much
    (Schulman et al. 2025, "LoRA Without Regret").
    """
    rate = min(LARGEST_RATE, BUILT_IN_RATE * (BUILT_IN_SIZE / parameters) ** 0.6)
    return float(f"{rate * (ADAPTER_FACTOR if adapter else 1.0):.1e}")


def supervised_learning_rate(parameters: int, *, new: bool, adapter: bool) -> float:
    """Learning rate of fine-tuning or of a reward model, to two digits; `new`: of a model that begins at random.

    Twice that of PPO, and at least 1e-5: 2e-5 at 124M, 1e-5 from 1B on (in use: 9e-6 for a reward model of 6B, Ouyang
    et al. 2022, 2203.02155; 2e-5 at 7B, Taori et al. 2023). A new model: 5e-3 at 0.9M (the built-in one), 6e-4 at 124M
    (Brown et al. 2020, 2005.14165, table 2.1).
    """
    if new:
        return float(f"{5e-3 * min(1.0, BUILT_IN_SIZE / parameters) ** 0.43:.1e}")
    rate = max(1e-5, 2.0 * usual_learning_rate(parameters, adapter=False))
    return float(f"{rate * (ADAPTER_FACTOR if adapter else 1.0):.1e}")


def lr_factor(schedule: str, progress: float, warmup: float = 0.0) -> float:
    """Factor of the learning rate at `progress` in [0, 1]: constant, linear to 0, or half a cosine to 0.

    `adaptive` is linear here: its adaptive factor is separate (`PacedRate`).
    """
    if warmup > 0 and progress < warmup:
        return progress / warmup
    rest = (progress - warmup) / max(1e-12, 1 - warmup)
    if schedule == "constant":
        return 1.0
    if schedule in ("linear", "adaptive"):
        return max(0.0, 1.0 - rest)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all groups, except those with their own."""
    for group in optimizer.param_groups:
        if not group.get(CONSTANT):
            group["lr"] = learning_rate


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
    # The first epoch's loss, and how many steps were left out: read at the end, since reading waits for a GPU.
    sums = float64(torch.zeros(2, device=features.device))
    sizes = ranks.all(len(features))
    begin = sum(sizes[: ranks.index])
    for epoch in range(epochs):
        order = shuffled(sum(sizes), seed, "critic", step, epoch)
        for rows in order.tensor_split(MINIBATCHES):
            if not len(rows):
                continue
            picked = (rows[(rows >= begin) & (rows < begin + len(features))] - begin).to(features.device)
            loss = critic.loss(features.index_select(0, picked), returns.index_select(0, picked)).sum()
            with ranks.sending(critic.parameters()):
                (loss / len(rows)).backward()
            if epoch == 0:
                sums[0] += float64(loss.detach())
            sums[1] += float64(~ranks.step(optimizer, critic.parameters()).isfinite())
    total, left_out = ranks.sum(sums).tolist()
    return total / max(1, sum(sizes)), not left_out
