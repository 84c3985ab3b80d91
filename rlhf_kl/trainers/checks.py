"""Fatal checks before the first update: what they find would make every later figure wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import GuardStop
from rlhf_kl.models.actor_critic import ActorCritic, response_logits, shared_trainable
from rlhf_kl.ops.logprobs import chosen_logprobs
from rlhf_kl.rollout.collect import Measured
from rlhf_kl.rollout.sampling import Sampled
from rlhf_kl.types import PromptBatch

LOG_RATIO_LIMIT = 1e-3  # float32; a mean ratio of 1 would prove nothing
LOG_RATIO_LIMIT_BF16 = 0.5  # one bf16 rounding of a logit of 20 is 0.06
KL_LIMIT = 1e-4
ROWS = 8


def check_start(
    model: ActorCritic,
    reference: Any,
    prompts: PromptBatch,
    sampled: Sampled,
    measured: Measured,
    *,
    temperature: float,
    same_start: bool,
    float32: bool,
) -> list[str]:
    """All checks on one batch sampled from the starting policy; returns what was found in order.

    Errors: GuardStop with the first check that fails.
    """
    limit = LOG_RATIO_LIMIT if float32 else LOG_RATIO_LIMIT_BF16
    shared = shared_trainable(model, reference)
    if shared:
        raise GuardStop(f"step 0: policy and reference share trainable tensors: {', '.join(shared[:3])}")
    if not all(bool(torch.isfinite(t).all()) for t in (measured.logprobs, measured.ref_logprobs, measured.exact_kl)):
        raise GuardStop("step 0: a log-prob of the policy or the reference is not finite")
    largest = float(measured.exact_kl.max())
    if same_start and largest > (KL_LIMIT if float32 else 1e-2):
        raise GuardStop(f"step 0: the reference is the starting policy, yet their exact KL is {largest:.3g} nats")
    gap = padding_gap(model.policy, prompts, sampled, measured.logprobs, temperature)
    if gap > limit:
        raise GuardStop(
            f"step 0: log-probs with and without padding differ by up to {gap:.3g}: "
            "the model does not honour attention_mask and position_ids"
        )
    ratio = "float32" if float32 else "bfloat16"
    return [
        f"exact KL at the start {largest:.1g}",
        f"padded against unpadded log-probs within {gap:.1g} ({ratio})",
    ]


@torch.no_grad()
def padding_gap(policy: Any, prompts: PromptBatch, sampled: Sampled, logprobs: Tensor, temperature: float) -> float:
    """Largest difference of a row's log-probs without any padding to those measured, and to the sampler's.

    `logprobs` (B, T) are the measured ones; the sampler reads prompts that are padded on the left.
    """
    device, rows = sampled.ids.device, min(ROWS, len(prompts))
    drawn, width = sampled.ids[:rows], sampled.ids.shape[1]
    ids = torch.cat([prompts.ids[:rows].to(device), drawn], 1)
    mask = torch.cat([prompts.mask[:rows].to(device), sampled.mask[:rows]], 1)
    padded = chosen_logprobs(response_logits(policy, ids, mask, width), drawn, temperature)
    worst = 0.0
    for i in range(rows):
        length = int(sampled.mask[i].sum())
        row = ids[i : i + 1, mask[i]]
        logits = response_logits(policy, row, torch.ones_like(row, dtype=torch.bool), length)
        alone = chosen_logprobs(logits, drawn[i : i + 1, :length], temperature)[0]
        for other in (padded[i, :length], logprobs[i, :length]):
            worst = max(worst, float((alone - other).abs().max()))
    return worst
