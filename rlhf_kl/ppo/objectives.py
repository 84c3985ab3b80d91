"""The objective of PPO: rewards with their KL penalty, advantages, and the losses of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.ops.advantages import ADVANTAGES
from rlhf_kl.ops.kl import ESTIMATORS, kl_of_next_states, shape_rewards
from rlhf_kl.ops.losses import policy_loss, value_loss
from rlhf_kl.ops.masked import float64, masked_variance, whiten
from rlhf_kl.ops.packing import send
from rlhf_kl.ppo.settings import PPOSettings
from rlhf_kl.types import RolloutBatch

MOST_WEIGHT = 2.0
ROUNDING = 1e-5  # of a KL in nats, and of a score over its size, at most


@dataclass(frozen=True)
class Tokens:
    """What the losses read of response tokens: tensors (B, T) of the batch of all processes, or (N,) of a pass."""

    kl_weight: float  # beta of the KL in the loss, in units of the advantages; 0 = no KL in the loss
    ids: Tensor  # long
    logprobs: Tensor  # of the policy that sampled
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor  # of each token in the losses; 0 outside of the mask

    @property
    def _figures(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if name not in ("kl_weight", "ids")}

    def flat(self, device: torch.device) -> Tokens:
        """All places (B * T,) of the batch, padding included, on the device of the training passes."""
        (ids,), figures = send(device, self.ids.flatten()), send(device, *(x.flatten() for x in self._figures.values()))
        return Tokens(self.kl_weight, ids, **dict(zip(self._figures, figures, strict=True)))

    def at(self, places: Tensor) -> Tokens:
        """Some of the places of `flat` (N,): no padding, so no mask."""
        return Tokens(self.kl_weight, self.ids[places], **{name: x[places] for name, x in self._figures.items()})


def ppo_targets(rollout: RolloutBatch, coef: float, ppo: PPOSettings) -> Tokens:
    """r_t = -beta KL_t + 1[t = T] score, then advantages and returns."""
    kl = kl_in_reward(rollout, ppo)
    targets = _critic_targets if ppo.critic else _group_targets
    advantages, weights, returns, scale = targets(rollout, kl, coef, ppo)
    if ppo.engine:
        advantages = advantages * importance(rollout)
    return Tokens(
        # The advantages beside the KL in the loss were divided by `scale`, so beta is divided too.
        kl_weight=0.0 if ppo.placement == "reward" else coef / scale,
        ids=rollout.response_ids,
        logprobs=rollout.logprobs,
        ref_logprobs=rollout.ref_logprobs,
        values=rollout.values,
        advantages=advantages,
        returns=returns,
        weights=weights,
    )


def importance(rollout: RolloutBatch) -> Tensor:
    """Truncated importance weights (B, T): policy over sampler at each token, at most `MOST_WEIGHT`.

    A surrogate is proportional to the size of its advantage, so they weigh there. Source: Ionides 2008, "Truncated
    importance sampling"; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return (rollout.logprobs - rollout.drawn).exp().clamp_max(MOST_WEIGHT)


TargetTensors = tuple[Tensor, Tensor, Tensor, float]  # advantages, weights, returns, divisor of the advantages


def _critic_targets(rollout: RolloutBatch, kl: Tensor, coef: float, ppo: PPOSettings) -> TargetTensors:
    """With a value function; advantages are whitened over the batch."""
    learned = rollout.weights.bool()
    estimate = ADVANTAGES[ppo.advantage].function
    scale = torch.ones(())
    rewards = shape_rewards(rollout.shaped_scores, kl, rollout.mask, coef)
    if ppo.whiten_rewards:
        rewards, scale = whiten(rewards, learned, center=False)
    advantages, returns = estimate(rewards, rollout.values, rollout.mask, ppo.gamma, ppo.lam)
    if ppo.critic_lam != ppo.lam:
        _, returns = estimate(rewards, rollout.values, rollout.mask, ppo.gamma, ppo.critic_lam)
    if _tells_nothing(rollout, learned):
        return torch.zeros_like(advantages), rollout.weights, returns, math.inf
    advantages, std = whiten(advantages, learned)
    return advantages, rollout.weights, returns, float(scale * std)


def _tells_nothing(rollout: RolloutBatch, learned: Tensor) -> bool:
    """Whether all scores are equal at a KL of 0: a step would follow rounding and the critic's errors, at full size."""
    scores, kl = rollout.shaped_scores[learned.any(1)], rollout.exact_kl[learned]
    if not len(scores):
        return False
    return bool(scores.max() - scores.min() <= ROUNDING * scores.abs().max()) and bool(kl.max() <= ROUNDING)


def _group_targets(rollout: RolloutBatch, kl: Tensor, coef: float, ppo: PPOSettings) -> TargetTensors:
    """With the other responses to a prompt; advantages keep the unit of the shaped score (or its group's spread)."""
    figures = (rollout.shaped_scores, coef * kl, rollout.mask, rollout.scored, ppo.group)
    estimator = ADVANTAGES[ppo.advantage]
    advantages, weights = estimator.function(*figures, **estimator.options(ppo))
    return advantages, weights, torch.zeros_like(advantages), 1.0


def kl_in_reward(rollout: RolloutBatch, ppo: PPOSettings) -> Tensor:
    """KL penalty of each token in the reward, before beta: (B, T) nats."""
    if ppo.placement == "loss":
        return torch.zeros_like(rollout.logprobs)
    if ppo.placement == "rao_blackwell":
        return kl_of_next_states(rollout.exact_kl, rollout.mask, ppo.gamma)
    if ppo.estimator == "exact":
        return rollout.exact_kl
    return ESTIMATORS[ppo.estimator](rollout.logprobs, rollout.ref_logprobs)


@dataclass(frozen=True)
class Loss:
    """Weighted sums over the tokens of a pass (scalars, the first two with gradients), or of a minibatch (numbers)."""

    policy: Any  # clipped surrogate, plus the KL if it is in the loss
    value: Any
    approx_kl: Any  # of the policy to the one that sampled, nats
    clipped: Any  # tokens on whose ratio the clip was binding
    max_logratio: Any  # largest |log pi - log pi_old|

    @torch.no_grad()
    def detached(self) -> Tensor:
        """Its five figures without gradients, in float64: (5,) in their order."""
        return float64(torch.stack([getattr(self, column.name) for column in fields(self)]))

    @staticmethod
    def joined(parts: Tensor) -> Tensor:
        """(n, 5) figures of passes, or of processes, as `detached` gives them, to those of all: (5,)."""
        return torch.cat([parts[..., :-1].sum(0), parts[..., -1:].amax(0)])

    @classmethod
    def total(cls, parts: Sequence[Loss]) -> Loss:
        """That of several, each in numbers."""
        columns = {column.name: [getattr(part, column.name) for part in parts] for column in fields(cls)}
        return cls(**{name: max(x) if name == "max_logratio" else sum(x) for name, x in columns.items()})


def ppo_loss(x: Tokens, logprobs: Tensor, penalty: Tensor, values: Tensor | None, ppo: PPOSettings) -> Loss:
    """Sums over the tokens of a pass, from the policy's log-probs, their KL penalties and values, if any: (N,) each.

    Source: Schulman et al. 2017 (1707.06347); Ziegler et al. 2019 (1909.08593).
    """
    surrogate, clipped = policy_loss(logprobs, x.logprobs, x.advantages, ppo.cliprange)
    value = torch.zeros((), device=x.ids.device)
    if values is not None:
        value = value_loss(values, x.values, x.returns, ppo.cliprange_value)
    log_ratio = (logprobs - x.logprobs).detach()
    return Loss(
        policy=(x.weights * surrogate).sum() + x.kl_weight * (x.weights * penalty).sum(),
        value=(x.weights * value).sum(),
        approx_kl=(x.weights * (torch.expm1(log_ratio) - log_ratio)).sum(),
        clipped=(x.weights * clipped).sum(),
        max_logratio=log_ratio.abs().max(),
    )


def explained_variance(targets: Tokens) -> float:
    """1 - var(returns - values) / var(returns), by the values of the rollout."""
    mask = targets.weights.bool()
    rest, total = (masked_variance(x, mask) for x in (targets.returns - targets.values, targets.returns))
    return float(1 - rest / total.clamp_min(1e-8))
