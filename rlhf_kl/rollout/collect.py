"""One rollout: sample, then measure with one pass of each model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.models.actor_critic import ActorCritic, read_states
from rlhf_kl.models.text import decode_responses
from rlhf_kl.ops.logprobs import compare_distributions, exact_kl
from rlhf_kl.ops.packing import Layout, Packed
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.features import StateFeatures
from rlhf_kl.rollout.reference import ReferenceLogits
from rlhf_kl.rollout.sampling import Sampled, sample_responses
from rlhf_kl.types import PromptBatch, RolloutBatch

SCORING_ROWS = 64  # in one pass, at most


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    eos_ids: list[int]
    pad_id: int


def draw(
    model: Any,
    prompts: PromptBatch,
    uniforms: Tensor,
    sampling: Sampling,
    device: Any,
    decoded: DecodedStates | None = None,
) -> Sampled:
    """Responses of a causal LM to a batch of prompts; `uniforms` (B, max_new_tokens) is the noise."""
    return sample_responses(
        model,
        prompts.ids.to(device),
        prompts.mask.to(device),
        uniforms,
        eos_ids=sampling.eos_ids,
        pad_id=sampling.pad_id,
        temperature=sampling.temperature,
        decoded=decoded,
    )


@dataclass(frozen=True)
class Measured:
    """What the models say of sampled responses; every tensor (B, T)."""

    logprobs: Tensor
    ref_logprobs: Tensor
    exact_kl: Tensor
    entropy: Tensor
    values: Tensor


@torch.no_grad()
def measure(
    model: Any,
    reference: Any,
    prompts: PromptBatch,
    sampled: Sampled,
    temperature: float,
    kept: ReferenceLogits | None = None,
    decoded: DecodedStates | None = None,
    features: StateFeatures | None = None,
) -> Measured:
    """Log-probs under policy and reference, exact KL, entropy and values, row by row in passes of equal length.

    `kept` keeps the reference's logits for later, where it has room; `decoded` spares the policy's own pass;
    `features` give the values where the model has none of its own; without either they are 0.
    """
    device = sampled.ids.device
    ids = torch.cat([prompts.ids.to(device), sampled.ids], 1)
    layout = Layout(ids, prompts.ids.shape[1], prompts.mask.sum(1), sampled.mask.sum(1))
    reference_logits = kept or ReferenceLogits(reference)
    reference_logits.begin(layout)
    if features is not None:
        features.begin(layout)
        reference_logits.hear = features.take
    if decoded is not None:
        decoded.settle(layout)
    columns = torch.zeros(5, *sampled.ids.shape, device=device)
    flat = columns.flatten(1)
    for packed in scoring_passes(layout, reference_logits):
        if decoded is not None:
            logits, values = decoded.output(model, packed)
        else:
            logits, values = model(packed.ids, packed.mask, packed.states, packed.prefixes)
        chosen = sampled.ids.flatten()[packed.places]
        found = compare_distributions(logits, reference_logits(packed), chosen, temperature)
        if features is not None:
            values = features.values(packed)
        for row, column in zip(flat, (*found, values), strict=True):
            if column is not None:
                row[packed.places] = column
    reference_logits.hear = None
    return Measured(*columns.unbind())


def scoring_passes(layout: Layout, reference: ReferenceLogits) -> Iterator[Packed]:
    """All rows of a batch in passes without gradients."""
    bounds = reference.pass_bounds(layout.ids.device)
    return layout.passes(range(len(layout.lengths)), most_rows=SCORING_ROWS, **bounds)


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
def exact_kl_now(model: ActorCritic, reference: ReferenceLogits, rollout: RolloutBatch, temperature: float) -> Tensor:
    """Exact KL (B, T) of the model as it is now, at the states of an earlier rollout."""
    kl = torch.zeros(rollout.mask.shape, device=rollout.mask.device)
    for packed in scoring_passes(rollout.layout, reference):
        logits, _ = read_states(model.policy, packed.ids, packed.mask, packed.states, packed.prefixes)
        kl.view(-1)[packed.places] = exact_kl(logits, reference(packed), temperature)
    return kl


def response_texts(tokenizer: Any, sampled: Sampled) -> list[str]:
    """Responses as text, special tokens left out."""
    return decode_responses(tokenizer, sampled.ids, sampled.mask)


def prompt_batch(prompts: Sequence[tuple[str, list[int]]], pad_id: int) -> PromptBatch:
    """A left-padded batch from (text, ids) pairs."""
    from rlhf_kl.models.text import pad

    ids, mask = pad([ids for _, ids in prompts], pad_id, left=True)
    return PromptBatch([text for text, _ in prompts], ids, mask)
