"""Advantage estimators: from values (`gae`), or from several responses to one prompt (`rloo`, `grpo`).

To add one of the second kind: a function called as `rloo` is, a line in `ADVANTAGES`, its name at `ppo.advantage`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUP_EPSILON = 1e-4  # beside a group's standard deviation, as in TRL


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


def rloo(scores: Tensor, penalties: Tensor, mask: Tensor, scored: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Advantages and weights of the tokens, both (B, T), zeros outside the mask.

    Score minus the mean score of the others in its group, minus the penalties to go relative to those of the others at
    the same position. Neither baseline depends on the response itself, so the expected gradient is unchanged.

    scores (B,), of responses in groups of `group` neighbours; penalties (B, T): the KL penalty of each token;
    scored (B,) bool: a response without a score has weight 0 and is in no baseline. A single score in a group has no
    other to be compared with.
    Source: Ahmadian et al. 2024 (2402.14740), equation 6; the second baseline is an addition.
    """
    column = scores.unsqueeze(1)
    others, count = _others(column, scored.unsqueeze(1), group)
    return _with_penalties(torch.where(count > 0, column - others, 0.0), penalties, mask & scored.unsqueeze(1), group)


def grpo(
    scores: Tensor, penalties: Tensor, mask: Tensor, scored: Tensor, group: int, *, scale_by_group_std: bool = True
) -> tuple[Tensor, Tensor]:
    """As `rloo`, with the score minus its group's mean, optionally divided by the sample standard deviation.

    The mean includes the response's own score, which scales the gradient by (n - 1) / n. The division gives prompts a
    higher weight if their scores differ little, so the expected gradient is not that of the mean score (Liu et al.
    2025, 2503.20783). Penalties are not divided. Source: Shao et al. 2024 (2402.03300), section 4.1.
    """
    grouped = scores.view(-1, group)
    known = scored.view(-1, group)
    count = known.sum(1, keepdim=True)
    mean = torch.where(known, grouped, 0.0).sum(1, keepdim=True) / count.clamp_min(1)
    lowest = torch.where(known, grouped, math.inf).amin(1)
    highest = torch.where(known, grouped, -math.inf).amax(1)
    equal = (lowest >= highest).unsqueeze(1)  # only rounding errors, which a division would enlarge
    rest = torch.where(known & ~equal, grouped - mean, 0.0)
    if scale_by_group_std:
        rest = rest / ((rest.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt() + GROUP_EPSILON)
    return _with_penalties(rest.view(-1, 1), penalties, mask & scored.unsqueeze(1), group)


def _with_penalties(scores: Tensor, penalties: Tensor, live: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Advantages of scores (B, 1) minus those of the penalties to go, and the tokens' weights."""
    to_go = torch.where(live, penalties, 0.0).flip(1).cumsum(1).flip(1)
    advantages = scores - (to_go - _others(to_go, live, group)[0])
    return torch.where(live, advantages, 0.0), live.to(advantages.dtype)


def _others(x: Tensor, known: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Mean (B, T) of `x` over the others of a group that are `known` (B, T), 0 if there are none; and their number."""
    values = torch.where(known, x, 0.0).view(-1, group, x.shape[1])
    there = known.view(-1, group, x.shape[1])
    count = there.sum(1, keepdim=True) - there.int()
    mean = (values.sum(1, keepdim=True) - values) / count.clamp_min(1)
    return torch.where(count > 0, mean, 0.0).view_as(x), count.view_as(x)


class Advantage(NamedTuple):
    """A kind of `ppo.advantage`, and what the starting beta has to know of it."""

    function: Callable[..., tuple[Tensor, Tensor]]
    weight: Callable[[int], float] = lambda _size: 1.0  # factor of the score, not of the KL penalty, in such a group
    options: Callable[[Any], dict[str, Any]] = lambda _ppo: {}  # what it takes of a config's `ppo`


ADVANTAGES = {
    "gae": Advantage(gae),
    "rloo": Advantage(rloo),
    "grpo": Advantage(
        grpo,
        weight=lambda size: (size - 1) / size,  # a group's mean contains each score
        options=lambda ppo: {"scale_by_group_std": ppo.scale_by_group_std},
    ),
}
