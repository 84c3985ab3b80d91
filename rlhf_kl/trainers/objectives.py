"""The objective of PPO: rewards with their KL penalty, advantages, and the losses of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kl.config.schema import KLSection, TrainConfig
from rlhf_kl.models.logits import Logits
from rlhf_kl.ops.advantages import gae, grpo, rloo
from rlhf_kl.ops.kl import ESTIMATORS
from rlhf_kl.ops.logprobs import chosen_logprobs, exact_kl
from rlhf_kl.ops.losses import policy_loss, value_loss
from rlhf_kl.ops.masked import Reduce, whiten
from rlhf_kl.ops.packing import Packed
from rlhf_kl.ops.reward_shaping import kl_of_next_states, shape_rewards
from rlhf_kl.types import RolloutBatch


@dataclass(frozen=True)
class Targets:
    """Targets of the losses of one update; tensors (B, T)."""

    advantages: Tensor
    weights: Tensor  # of each token in the losses; 0 outside of the mask
    returns: Tensor
    kl_weight: float  # beta of the KL in the loss, in units of the advantages; 0 = no KL in the loss


def ppo_targets(rollout: RolloutBatch, coef: float, config: TrainConfig, reduce: Reduce) -> Targets:
    """r_t = -beta KL_t + 1[t = T] score, then advantages and returns; `reduce` sums over processes."""
    kl = kl_in_reward(rollout, config.kl, config.ppo.gamma)
    targets = _critic_targets if config.critic else _group_targets
    advantages, weights, returns, scale = targets(rollout, kl, coef, config, reduce)
    # The advantages beside the KL in the loss were divided by `scale`, so beta is divided too.
    return Targets(advantages, weights, returns, 0.0 if config.kl.placement == "reward" else coef / scale)


TargetTensors = tuple[Tensor, Tensor, Tensor, float]  # advantages, weights, returns, divisor of the advantages


def _critic_targets(
    rollout: RolloutBatch, kl: Tensor, coef: float, config: TrainConfig, reduce: Reduce
) -> TargetTensors:
    """With a value function; advantages are whitened over the global batch."""
    cfg, learned, scale = config.ppo, rollout.weights.bool(), torch.ones(())
    rewards = shape_rewards(rollout.shaped_scores, kl, rollout.mask, coef)
    if cfg.whiten_rewards:
        rewards, scale = whiten(rewards, learned, center=False, reduce=reduce)
    advantages, returns = gae(rewards, rollout.values, rollout.mask, cfg.gamma, cfg.lam)
    if config.critic_lam != cfg.lam:
        _, returns = gae(rewards, rollout.values, rollout.mask, cfg.gamma, config.critic_lam)
    advantages, std = whiten(advantages, learned, reduce=reduce)
    return advantages, rollout.weights, returns, float(scale * std)


def _group_targets(rollout: RolloutBatch, kl: Tensor, coef: float, config: TrainConfig, _: Reduce) -> TargetTensors:
    """With the other responses to a prompt; advantages keep the unit of the shaped score (or its group's spread)."""
    figures = (rollout.shaped_scores, coef * kl, rollout.mask, rollout.scored, config.rollout.samples_per_prompt)
    if config.ppo.advantage == "rloo":
        advantages, weights = rloo(*figures)
    else:
        advantages, weights = grpo(*figures, scale_by_std=config.ppo.scale_by_group_std)
    return advantages, weights, torch.zeros_like(advantages), 1.0


def kl_in_reward(rollout: RolloutBatch, kl: KLSection, gamma: float) -> Tensor:
    """KL penalty of each token in the reward, before beta: (B, T) nats; `gamma` is the discount of one step."""
    if kl.placement == "loss":
        return torch.zeros_like(rollout.logprobs)
    if kl.placement == "rao_blackwell":
        return kl_of_next_states(rollout.exact_kl, rollout.mask, gamma)
    if kl.estimator == "exact":
        return rollout.exact_kl
    return ESTIMATORS[kl.estimator](rollout.logprobs, rollout.ref_logprobs)


class Losses(NamedTuple):
    """Weighted sums over the N tokens of a microbatch; scalars, the first two with gradients."""

    policy: Tensor  # clipped surrogate, plus the KL if it is in the loss
    value: Tensor
    approx_kl: Tensor  # of the policy to the one that sampled, nats
    clipped: Tensor  # tokens on whose ratio the clip was binding
    max_logratio: Tensor  # largest |log pi - log pi_old|


def ppo_losses(
    rollout: RolloutBatch,
    targets: Targets,
    rows: Packed,
    logits: Logits,
    values: Tensor | None,
    config: TrainConfig,
    ref_logits: Callable[[Tensor], Tensor],
) -> Losses:
    """Losses at the tokens of a microbatch, from the policy's `logits` there and `values` (N,), if there are any.

    `ref_logits(numbers (n,)) -> (n, V)` returns the reference's logits, for the exact KL in the loss.
    Source: Schulman et al. 2017 (1707.06347); Ziegler et al. 2019 (1909.08593).
    """
    cfg, kl, temperature = config.ppo, config.kl, config.rollout.temperature

    def pick(x: Tensor) -> Tensor:
        return x.flatten()[rows.places]  # (N,): no padding, so no mask

    ids, old, ref = pick(rollout.response_ids), pick(rollout.logprobs), pick(rollout.ref_logprobs)
    in_loss = targets.kl_weight != 0.0

    def per_token(x: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        logprobs = chosen_logprobs(x, ids[at], temperature)
        if not in_loss:
            return logprobs, torch.zeros_like(logprobs)
        if kl.estimator == "exact":
            return logprobs, exact_kl(x, ref_logits(rows.numbers[at]), temperature)
        return logprobs, ESTIMATORS[kl.estimator](logprobs, ref[at])

    weights = pick(targets.weights)
    logprobs, penalty = logits.map(per_token)
    surrogate, clipped = policy_loss(logprobs, old, pick(targets.advantages), cfg.cliprange)
    value = torch.zeros((), device=ids.device)
    if values is not None:
        value = value_loss(values, pick(rollout.values), pick(targets.returns), cfg.cliprange_value)
    log_ratio = (logprobs - old).detach()
    return Losses(
        policy=(weights * surrogate).sum() + targets.kl_weight * (weights * penalty).sum(),
        value=(weights * value).sum(),
        approx_kl=(weights * (torch.expm1(log_ratio) - log_ratio)).sum(),
        clipped=(weights * clipped).sum(),
        max_logratio=log_ratio.abs().max(),
    )
