"""The reward of each token: a KL penalty everywhere and the score at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def last_token(mask: Tensor) -> Tensor:
    """Index (B,) of the last True of each row of `mask` (B, T); 0 for a row without any."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, torch.zeros_like(positions)).amax(1)


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """r_t = -coef * KL_t, plus the score at the last token; (B, T), zeros outside the mask.

    scores (B,), kl (B, T) in nats, mask (B, T). Source: Ziegler et al. 2019 (1909.08593), section 2.
    """
    rewards = torch.where(mask, -coef * kl, torch.zeros_like(kl))
    has_tokens = mask.any(1).to(rewards.dtype)
    return rewards.scatter_add(1, last_token(mask).unsqueeze(1), (scores.to(rewards) * has_tokens).unsqueeze(1))


def kl_of_next_states(kl: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """KL of the state that each token leads to: gamma times kl (B, T) moved one place to the left, 0 at the last token.

    With exact KL, the current state's KL does not depend on the token drawn there: it belongs in the loss,
    and only the KL of later states in the reward (Amini et al. 2025, 2504.10637). The next state's KL is paid one
    step early, so it includes the discount of that step.
    """
    shifted = torch.zeros_like(kl)
    shifted[:, :-1] = torch.where(mask[:, 1:], gamma * kl[:, 1:], torch.zeros_like(kl[:, 1:]))
    return shifted
