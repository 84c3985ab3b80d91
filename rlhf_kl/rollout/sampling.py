"""Sampling from the policy: temperature only, no top-k, no top-p, or the KL would be wrong."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.models.actor_critic import position_ids

STOP_TEST_EVERY = 4  # asking the device whether all rows are done makes it wait


class Sampled(NamedTuple):
    """Responses, padded on the right."""

    ids: Tensor  # (B, T) long, EOS included
    mask: Tensor  # (B, T) bool
    ended: Tensor  # (B,) bool: the response has an EOS


def pick_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling: ids (B,) from logits (B, V) and one number in [0, 1) per row (B,).

    The token is where the cumulative probability first exceeds the number: one random number a token, so
    runs with the same seed see the same noise whatever their policies do.
    """
    cumulative = torch.softmax(logits.float() / temperature, -1).double().cumsum(-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_max(logits.shape[-1] - 1)


@torch.no_grad()
def sample_responses(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    *,
    eos_ids: list[int],
    pad_id: int,
    temperature: float,
) -> Sampled:
    """Responses of `model` to left-padded prompts (B, P), at most `uniforms.shape[1]` tokens each.

    `uniforms` (B, T) holds the sampling noise. A response ends with its first EOS; shapes are trimmed to the
    longest response.
    """
    device, limit = prompt_ids.device, uniforms.shape[1]
    uniforms = uniforms.to(device)
    stops = torch.tensor(eos_ids, device=device)
    rows = len(prompt_ids)
    ids = torch.full((rows, limit), pad_id, dtype=torch.long, device=device)
    mask = torch.zeros((rows, limit), dtype=torch.bool, device=device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    attention = torch.cat([prompt_mask, torch.ones((rows, limit), dtype=torch.bool, device=device)], 1)
    positions = position_ids(attention)
    width = prompt_ids.shape[1]
    inputs, cache = prompt_ids, None
    for step in range(limit):
        seen = width + step
        output = model(
            input_ids=inputs,
            attention_mask=attention[:, :seen],
            position_ids=positions[:, seen - inputs.shape[1] : seen],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        token = pick_tokens(output.logits[:, -1], uniforms[:, step], temperature)
        ids[:, step] = torch.where(alive, token, ids[:, step])
        mask[:, step] = alive
        alive = alive & ~torch.isin(token, stops)
        if (step + 1) % STOP_TEST_EVERY == 0 and not bool(alive.any()):
            break
        inputs = token.unsqueeze(1)
    length = int(mask.sum(1).max())
    return Sampled(ids[:, :length], mask[:, :length], ~alive)
