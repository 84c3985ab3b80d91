"""The objective of PPO: rewards with their KL penalty, advantages, and the losses of a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.control import KLSection
from rlhf_kl.config.schema.training import PPOSection
from rlhf_kl.ops.advantages import ADVANTAGES
from rlhf_kl.ops.kl import ESTIMATORS, kl_of_next_states, shape_rewards
from rlhf_kl.ops.losses import policy_loss, value_loss
from rlhf_kl.ops.masked import float64, masked_variance, whiten
from rlhf_kl.types import RolloutBatch

MOST_WEIGHT = 2.0


@dataclass(frozen=True)
class Targets:
    """Targets of the losses of one update; tensors (B, T) of the batch of all processes."""

    advantages: Tensor
    weights: Tensor  # of each token in the losses; 0 outside of the mask
    returns: Tensor
    kl_weight: float  # beta of the KL in the loss, in units of the advantages; 0 = no KL in the loss


def ppo_targets(rollout: RolloutBatch, coef: float, config: TrainConfig) -> Targets:
    """r_t = -beta KL_t + 1[t = T] score, then advantages and returns."""
    kl = kl_in_reward(rollout, config.kl, config.ppo.gamma)
    targets = _critic_targets if config.critic else _group_targets
    advantages, weights, returns, scale = targets(rollout, kl, coef, config)
    if config.rollout.engine is not None:
        advantages = advantages * importance(rollout)
    # The advantages beside the KL in the loss were divided by `scale`, so beta is divided too.
    return Targets(advantages, weights, returns, 0.0 if config.kl.placement == "reward" else coef / scale)


def importance(rollout: RolloutBatch) -> Tensor:
    """Truncated importance weights (B, T): policy over sampler at each token, at most `MOST_WEIGHT`.

    A surrogate is proportional to the size of its advantage, so they weigh there. Source: Ionides 2008, "Truncated
    importance sampling"; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return (rollout.logprobs - rollout.drawn).exp().clamp_max(MOST_WEIGHT)


TargetTensors = tuple[Tensor, Tensor, Tensor, float]  # advantages, weights, returns, divisor of the advantages


def _critic_targets(rollout: RolloutBatch, kl: Tensor, coef: float, config: TrainConfig) -> TargetTensors:
    """With a value function; advantages are whitened over the batch."""
    cfg = config.ppo
    learned = rollout.weights.bool()
    estimate = ADVANTAGES[cfg.advantage].function
    scale = torch.ones(())
    rewards = shape_rewards(rollout.shaped_scores, kl, rollout.mask, coef)
    if cfg.whiten_rewards:
        rewards, scale = whiten(rewards, learned, center=False)
    advantages, returns = estimate(rewards, rollout.values, rollout.mask, cfg.gamma, cfg.lam)
    if config.critic_lam != cfg.lam:
        _, returns = estimate(rewards, rollout.values, rollout.mask, cfg.gamma, config.critic_lam)
    advantages, std = whiten(advantages, learned)
    return advantages, rollout.weights, returns, float(scale * std)


def _group_targets(rollout: RolloutBatch, kl: Tensor, coef: float, config: TrainConfig) -> TargetTensors:
    """With the other responses to a prompt; advantages keep the unit of the shaped score (or its group's spread)."""
    figures = (rollout.shaped_scores, coef * kl, rollout.mask, rollout.scored, config.rollout.samples_per_prompt)
    estimator = ADVANTAGES[config.ppo.advantage]
    advantages, weights = estimator.function(*figures, **estimator.options(config.ppo))
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


@dataclass(frozen=True)
class Tokens:
    """What the losses read of response tokens; tensors (N,) on the device of the training passes."""

    kl_weight: float  # of `Targets`
    ids: Tensor  # long
    logprobs: Tensor  # of the policy that sampled
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor

    @classmethod
    def of(cls, rollout: RolloutBatch, targets: Targets) -> Tokens:
        """All places (B * T,) of a batch, padding included."""
        columns = {
            "logprobs": rollout.logprobs,
            "ref_logprobs": rollout.ref_logprobs,
            "values": rollout.values,
            "advantages": targets.advantages,
            "returns": targets.returns,
            "weights": targets.weights,
        }
        figures = torch.stack([x.flatten() for x in columns.values()]).to(rollout.device)  # one transfer
        ids = rollout.response_ids.flatten().to(rollout.device)
        return cls(targets.kl_weight, ids, **dict(zip(columns, figures, strict=True)))

    def at(self, places: Tensor) -> Tokens:
        """Some of them, by place (N,): no padding, so no mask."""
        tensors = {name: value[places] for name, value in vars(self).items() if name != "kl_weight"}
        return replace(self, **tensors)


@dataclass(frozen=True)
class Loss:
    """Weighted sums over the tokens of a pass (scalars, the first two with gradients), or of a minibatch (numbers)."""

    policy: Any  # clipped surrogate, plus the KL if it is in the loss
    value: Any
    approx_kl: Any  # of the policy to the one that sampled, nats
    clipped: Any  # tokens on whose ratio the clip was binding
    max_logratio: Any  # largest |log pi - log pi_old|

    def detached(self) -> Tensor:
        """Its five figures without gradients, in float64: (5,) in their order."""
        return torch.stack([float64(getattr(self, column.name).detach()) for column in fields(self)])

    @staticmethod
    def joined(parts: Tensor) -> Tensor:
        """(n, 5) figures of passes, or of processes, as `detached` gives them, to those of all: (5,)."""
        return torch.cat([parts[:, :-1].sum(0), parts[:, -1:].amax(0)])

    @classmethod
    def total(cls, parts: Sequence[Loss]) -> Loss:
        """That of several, each in numbers."""
        columns = {column.name: [getattr(part, column.name) for part in parts] for column in fields(cls)}
        return cls(**{name: max(x) if name == "max_logratio" else sum(x) for name, x in columns.items()})


def ppo_loss(x: Tokens, logprobs: Tensor, penalty: Tensor, values: Tensor | None, cfg: PPOSection) -> Loss:
    """Sums over the tokens of a pass, from the policy's log-probs, their KL penalties and values, if any: (N,) each.

    Source: Schulman et al. 2017 (1707.06347); Ziegler et al. 2019 (1909.08593).
    """
    surrogate, clipped = policy_loss(logprobs, x.logprobs, x.advantages, cfg.cliprange)
    value = torch.zeros((), device=x.ids.device)
    if values is not None:
        value = value_loss(values, x.values, x.returns, cfg.cliprange_value)
    log_ratio = (logprobs - x.logprobs).detach()
    return Loss(
        policy=(x.weights * surrogate).sum() + x.kl_weight * (x.weights * penalty).sum(),
        value=(x.weights * value).sum(),
        approx_kl=(x.weights * (torch.expm1(log_ratio) - log_ratio)).sum(),
        clipped=(x.weights * clipped).sum(),
        max_logratio=log_ratio.abs().max(),
    )


def explained_variance(rollout: RolloutBatch, targets: Targets) -> float:
    """1 - var(returns - values) / var(returns)."""
    mask = targets.weights.bool()
    rest, total = (masked_variance(x, mask) for x in (targets.returns - rollout.values, targets.returns))
    return float(1 - rest / total.clamp_min(1e-8))
