"""The clipped losses of PPO and the pairwise loss of reward models, per token or per pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per token and whether the clip was active, both (B, T).

    max(-A r, -A clip(r, 1 - c, 1 + c)) with r = pi / pi_old.
    Source: Schulman et al. 2017 (1707.06347), equation 7.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per token, (B, T).

    Source: Huang et al. 2023, "The N implementation details of RLHF with PPO" (value clipping of openai/baselines).
    """
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected) per pair, (B,). Source: Bradley & Terry 1952; Ouyang et al. 2022, eq. 1."""
    return -F.logsigmoid(chosen - rejected)
