"""Fatal checks before the first update: what they refuse would make every later figure wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf_kl.errors import GuardStop
from rlhf_kl.models.value import shared_trainable
from rlhf_kl.rollout.collect import TokenStats
from rlhf_kl.types import Sampled

LOG_RATIO_LIMIT = 1e-3  # float32; a mean ratio of 1 would prove nothing
LOG_RATIO_LIMIT_BF16 = 0.5  # one bf16 rounding of a hidden state moves a log-prob by hundredths
KL_LIMIT, KL_LIMIT_BF16 = 1e-4, 1e-2


def check_start(
    policy: nn.Module,
    reference: nn.Module,
    sampled: Sampled,
    stats: TokenStats,
    *,
    reference_is_initial_policy: bool,
    float32: bool,
) -> list[str]:
    """All checks on one batch sampled from the starting policy; returns their results in words, in order.

    Errors: GuardStop with the first check that fails.
    """
    shared = shared_trainable(policy, reference)
    if shared:
        raise GuardStop(f"step 0: policy and reference share trainable tensors: {', '.join(shared[:3])}")
    if not all(bool(torch.isfinite(t).all()) for t in (stats.logprobs, stats.ref_logprobs, stats.exact_kl)):
        raise GuardStop("step 0: a log-prob of the policy or the reference is not finite")
    largest = float(stats.exact_kl.max())
    if reference_is_initial_policy and largest > (KL_LIMIT if float32 else KL_LIMIT_BF16):
        raise GuardStop(f"step 0: the reference is the starting policy, yet their exact KL is {largest:.3g} nats")
    gap = padding_gap(sampled, stats.logprobs)
    if gap > (LOG_RATIO_LIMIT if float32 else LOG_RATIO_LIMIT_BF16):
        raise GuardStop(
            f"step 0: log-probs with and without padding differ by up to {gap:.3g}: "
            "the model does not honour attention_mask and position_ids"
        )
    return [
        f"exact KL at the start {largest:.1g}",
        f"padded against unpadded log-probs within {gap:.1g} ({'float32' if float32 else 'bfloat16'})",
    ]


def padding_gap(sampled: Sampled, logprobs: Tensor) -> float:
    """Largest difference of a token's log-prob (B, T) in a pass over its row to that with which it was drawn.

    The sampler reads prompts padded on the left, through mask and position ids, and goes on from a cache; a pass has
    no padding in front of a row. So both agree only where the model honours all three.
    """
    return float((sampled.logprobs - logprobs).abs()[sampled.mask].max())
