"""One rollout: sample, then measure with one pass of each model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.models.actor_critic import ActorCritic, response_logits
from rlhf_kl.models.text import decode_responses
from rlhf_kl.ops.logprobs import compare_distributions
from rlhf_kl.rollout.sampling import Sampled, sample_responses
from rlhf_kl.types import PromptBatch, RolloutBatch

LOGIT_ELEMENTS = 1 << 26  # numbers in the logits of one scoring pass: 256 MiB in float32


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    eos_ids: list[int]
    pad_id: int


def draw(model: Any, prompts: PromptBatch, uniforms: Tensor, sampling: Sampling, device: Any) -> Sampled:
    """Responses of a causal LM to a batch of prompts; `uniforms` (B, max_new_tokens) is the noise."""
    return sample_responses(
        model,
        prompts.ids.to(device),
        prompts.mask.to(device),
        uniforms,
        eos_ids=sampling.eos_ids,
        pad_id=sampling.pad_id,
        temperature=sampling.temperature,
    )


@dataclass(frozen=True)
class Measured:
    """What the models say of sampled responses; every tensor (B, T)."""

    logprobs: Tensor
    ref_logprobs: Tensor
    exact_kl: Tensor
    entropy: Tensor
    values: Tensor


def scoring_rows(rows: int, width: int, vocabulary: int) -> int:
    """Rows in one scoring pass, so that its logits stay within a fixed size."""
    return max(1, min(rows, LOGIT_ELEMENTS // max(1, 2 * width * vocabulary)))


@torch.no_grad()
def measure(
    model: Callable[..., Any], reference: Any, prompts: PromptBatch, sampled: Sampled, temperature: float
) -> Measured:
    """Log-probs under policy and reference, exact KL, entropy and values, in chunks of rows."""
    device = sampled.ids.device
    prompt_mask = prompts.mask.to(device)
    ids = torch.cat([prompts.ids.to(device), sampled.ids], 1)
    mask = torch.cat([prompt_mask, sampled.mask], 1)
    width = sampled.ids.shape[1]
    step = scoring_rows(len(ids), width, reference.config.get_text_config().vocab_size)
    pieces = []
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        logits, values = model(ids[rows], mask[rows], width)
        ref_logits = response_logits(reference, ids[rows], mask[rows], width)
        pieces.append((*compare_distributions(logits, ref_logits, sampled.ids[rows], temperature), values))
    live = sampled.mask
    columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
    return Measured(*(torch.where(live, column, torch.zeros_like(column)) for column in columns))


def assemble(
    prompts: PromptBatch, sampled: Sampled, measured: Measured, scores: Tensor, shaped: Tensor
) -> RolloutBatch:
    """The rollout batch from its parts."""
    device = sampled.ids.device
    return RolloutBatch(
        prompt_ids=prompts.ids.to(device),
        prompt_mask=prompts.mask.to(device),
        response_ids=sampled.ids,
        mask=sampled.mask,
        logprobs=measured.logprobs,
        ref_logprobs=measured.ref_logprobs,
        exact_kl=measured.exact_kl,
        entropy=measured.entropy,
        values=measured.values,
        scores=scores.to(device),
        shaped_scores=shaped.to(device),
        ended=sampled.ended,
    )


@torch.no_grad()
def exact_kl_now(model: ActorCritic, reference: Any, rollout: RolloutBatch, temperature: float) -> Tensor:
    """Exact KL (B, T) of the model as it is now, at the states of an earlier rollout."""
    width = rollout.response_ids.shape[1]
    step = scoring_rows(len(rollout), width, reference.config.get_text_config().vocab_size)
    pieces = []
    for start in range(0, len(rollout), step):
        rows = slice(start, start + step)
        ids, mask = rollout.input_ids[rows], rollout.attention_mask[rows]
        logits = response_logits(model.policy, ids, mask, width)
        ref_logits = response_logits(reference, ids, mask, width)
        pieces.append(compare_distributions(logits, ref_logits, rollout.response_ids[rows], temperature).exact_kl)
    kl = torch.cat(pieces)
    return torch.where(rollout.mask, kl, torch.zeros_like(kl))


def response_texts(tokenizer: Any, sampled: Sampled) -> list[str]:
    """Responses as text, special tokens left out."""
    return decode_responses(tokenizer, sampled.ids, sampled.mask)


def prompt_batch(prompts: Sequence[tuple[str, list[int]]], pad_id: int) -> PromptBatch:
    """A left-padded batch from (text, ids) pairs."""
    from rlhf_kl.models.text import pad

    ids, mask = pad([ids for _, ids in prompts], pad_id, left=True)
    return PromptBatch([text for text, _ in prompts], ids, mask)
