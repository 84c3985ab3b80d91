"""Estimators of KL(pi || ref) per token from log-probs of the sampled tokens, and the KL-shaped reward.

With lr = log pi(a|s) - log ref(a|s) and a sampled from pi. Sources: Schulman 2020, "Approximating KL
divergence" (k1, k2, k3); Tang & Munos 2025 (2506.09477) and Liu et al. 2025 (2510.01555) for gradients.
`exact` (the sum over the vocabulary) needs full distributions: `rlhf_kl.ops.logprobs.exact_kl`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """lr. Unbiased, noisy, often negative for a sample.

    Gradient: in the reward, its policy gradient is grad KL(pi || ref). As a loss its expected gradient is 0.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """lr^2 / 2. Biased, low variance, never negative.

    Gradient: as a loss, grad KL(pi || ref) at the state where the token was sampled.
    """
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-lr) - 1 + lr. Unbiased, never negative; less noisy than k1 only near the reference.

    Gradient: as a loss, grad KL(ref || pi), the other direction. In the reward,
    grad KL(pi || ref) - grad KL(ref || pi).
    """
    lr = logprobs - ref_logprobs
    return torch.expm1(-lr) + lr


def importance(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(lr) * lr. Unbiased for KL(pi || ref) only when the tokens were sampled from *ref*.

    Averaged over samples from pi, as in a rollout, it is too high: three times at a tiny KL, more at a larger one.
    """
    lr = logprobs - ref_logprobs
    return lr.exp() * lr


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "importance": importance}


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token KL estimate, same shape as the log-probs, in nats.

    Errors: ValueError for an unknown name, and for `exact`, which needs more than the sampled tokens.
    """
    if estimator == "exact":
        raise ValueError("exact KL needs full distributions: use rlhf_kl.exact_kl(logits, ref_logits)")
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}: one of {', '.join(ESTIMATORS)}")
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ")
    return ESTIMATORS[estimator](logprobs, ref_logprobs)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x
    if mask.shape != x.shape:
        raise ValueError(f"mask {tuple(mask.shape)} and log-probs {tuple(x.shape)} differ")
    return torch.where(mask, x, torch.zeros_like(x))


def _estimated(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, mask: Tensor | None) -> Tensor:
    """KL estimates, 0 outside of the mask; padding has no gradient, however far its log-probs are apart."""
    return estimate_kl(_masked(logprobs, mask), _masked(ref_logprobs, mask), estimator)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, coef: float, estimator: str = "k1", mask: Tensor | None = None
) -> Tensor:
    """coef * mean KL estimate, a scalar in nats per token.

    `logprobs` and `ref_logprobs` have one shape; `mask` (that shape, bool) selects the policy's tokens.
    """
    kl = _estimated(logprobs, ref_logprobs, estimator, mask)
    return coef * kl.mean() if mask is None else coef * kl.sum() / mask.sum()


def rewards_with_kl(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    coef: float,
    estimator: str = "k1",
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores minus the KL penalty: (rewards, kl), both of the log-probs' shape.

    Equal shapes are elementwise: rewards = scores - coef * kl. Scores (B,) with log-probs (B, T) need the
    `mask` (B, T) and are added at the last selected token of each row (Ziegler et al. 2019, section 2).
    """
    kl = _estimated(logprobs, ref_logprobs, estimator, mask)
    if scores.shape == kl.shape:
        return _masked(scores, mask) - coef * kl, kl
    if kl.dim() != 2 or scores.shape != kl.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} fit neither (B, T) nor (B,) of {tuple(kl.shape)}")
    if mask is None:
        raise ValueError("scores (B,) with log-probs (B, T) need a mask (B, T) to find the last token")
    return shape_rewards(scores, kl, mask, coef), kl


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
