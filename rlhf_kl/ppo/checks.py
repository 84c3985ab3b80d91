"""Fatal checks before the first update: a failure means that every later figure would be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import GuardStop
from rlhf_kl.models.lm import FLOAT16_ENDS
from rlhf_kl.models.value import shared_trainable
from rlhf_kl.ops.logprobs import TokenStats
from rlhf_kl.types import Sampled

CHECKED_ROWS = 64  # responses of the starting policy that the checks look at
CHECKED_TOKENS = 8  # of each; `check_first` looks at whole ones
LOG_RATIO_LIMIT = 1e-3  # float32; checked per token, since a mean ratio of 1 proves nothing
LOG_RATIO_LIMIT_HALF = 0.5  # one bf16 rounding of a hidden state moves a log-prob by hundredths
KL_LIMIT, KL_LIMIT_HALF = 1e-4, 1e-2


def checked_prompts(prompts: PromptStream) -> list[tuple[int, ...]]:
    """The tokens of prompts for `check_start`: a rollout's batch, at most 64, of which some are padded on the left.

    Different prompts, from the shortest to the longest. If all have the same length, one is cut to its first half (or
    doubled, if it has a single token), so that there is padding to check.
    """
    rows = sorted(dict.fromkeys(map(tuple, prompts.table.ids)), key=len)
    count = max(2, min(CHECKED_ROWS, prompts.batch_size))
    if len(rows[0]) == len(rows[-1]):
        rows = [rows[0][: len(rows[0]) // 2] or rows[0] * 2, *rows]
    # Evenly over the lengths, both ends included; repeated if there are fewer than `count`.
    spread = min(count, len(rows))
    return [rows[round(i % spread * (len(rows) - 1) / (spread - 1))] for i in range(count)]


def check_start(
    policy: nn.Module,
    reference: nn.Module,
    sampled: Sampled,
    stats: TokenStats,
    *,
    reference_is_initial_policy: bool,
    dtype: str,
    engine: bool = False,
) -> list[str]:
    """All checks on one batch sampled from the starting policy; returns their results in words, in order.

    `dtype`: that of `run`. `engine`: one has drawn it, which computes otherwise than a pass. Errors: GuardStop with the
    first check that fails.
    """
    float32 = dtype == "float32"
    shared = shared_trainable(policy, reference)
    if shared:
        raise GuardStop(f"step 0: policy and reference share trainable tensors: {', '.join(shared[:3])}")
    figures = sampled.logprobs, stats.logprobs, stats.ref_logprobs, stats.exact_kl
    if not all(bool(torch.isfinite(t).all()) for t in figures):
        advice = f": activations may be too large, since {FLOAT16_ENDS}" if dtype == "float16" else ""
        raise GuardStop(f"step 0: a log-prob of the policy or the reference is not finite{advice}")
    largest = float(stats.exact_kl.max())
    if reference_is_initial_policy and largest > (KL_LIMIT if float32 else KL_LIMIT_HALF):
        raise GuardStop(f"step 0: the reference is the starting policy, yet their exact KL is {largest:.3g} nats")
    gap = padding_gap(sampled, stats.logprobs)
    at_start = f"largest KL of a token at the start {largest:.1g} nats"
    if engine:
        if gap > LOG_RATIO_LIMIT_HALF:
            raise GuardStop(
                f"step 0: log-probs of the engine and of the policy differ by up to {gap:.3g}: it computes another "
                "model than the policy"
            )
        return [at_start, f"log-probs of engine and policy within {gap:.1g}"]
    if gap > (LOG_RATIO_LIMIT if float32 else LOG_RATIO_LIMIT_HALF):
        raise GuardStop(
            f"step 0: log-probs with and without padding differ by up to {gap:.3g}: "
            "the model does not use attention_mask and position_ids correctly"
        )
    return [
        at_start,
        f"padded against unpadded log-probs within {gap:.1g} ({dtype})",
    ]


def padding_gap(sampled: Sampled, logprobs: Tensor) -> float:
    """Largest difference of a token's log-prob (B, T) in a pass over its row to that with which it was drawn.

    The sampler reads prompts padded on the left, through mask and position ids, and continues from a cache; a pass has
    no padding in front of a row. So both agree only if the model uses all three correctly.
    """
    return float((sampled.logprobs - logprobs).abs()[sampled.mask].max())


def check_first(row: Mapping[str, Any], *, float32: bool) -> None:
    """The last fatal check: before its first step the policy must agree with its own rollout.

    An update that does not change the policy, as in the warm-up of a critic, has no such figure: NaN.
    """
    gap = row["policy/logratio_first_max"]
    if float32 and gap > LOG_RATIO_LIMIT:
        raise GuardStop(
            f"step {row['step'] - 1}: before the policy's first optimizer step a log-prob differs by "
            f"{gap:.3g} from the rollout's own"
        )
