"""Sampling from the policy: temperature only, no top-k, no top-p, or the KL would be wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.models.actor_critic import position_ids
from rlhf_kl.rollout.cache import reserve
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.gpt2_step import GPT2Step, gpt2_step
from rlhf_kl.rollout.prefill import read_once

STOP_TEST_EVERY = 4  # asking the device which rows are done makes it wait
COMPACT_BELOW = 0.8  # share of rows still going at which the others leave the batch


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
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    cumulative = torch.softmax(scaled, -1).double().cumsum(-1)
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
    decoded: DecodedStates | None = None,
) -> Sampled:
    """Responses of `model` to left-padded prompts (B, P), at most `uniforms.shape[1]` tokens each.

    `uniforms` (B, T) holds the sampling noise. A response ends with its first EOS; shapes are trimmed to the
    longest response. `decoded` is told what the model said.
    """
    quick = gpt2_step(model)
    with decoded.listening(model) if decoded is not None else nullcontext():
        return _decode(model, quick, prompt_ids, prompt_mask, uniforms, eos_ids, pad_id, temperature, decoded)


def _decode(
    model: Any,
    quick: GPT2Step | None,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    eos_ids: list[int],
    pad_id: int,
    temperature: float,
    decoded: DecodedStates | None,
) -> Sampled:
    device, limit = prompt_ids.device, uniforms.shape[1]
    stops = torch.tensor(eos_ids, device=device)
    (rows, width), end = prompt_ids.shape, prompt_ids.shape[1] + limit
    drawn: list[tuple[Tensor, Tensor]] = []  # a step each: the rows (b,) in the batch and their tokens (b,)

    # Of the rows that are still in the batch:
    going = torch.arange(rows, device=device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    noise = uniforms.to(device)
    attention = torch.cat([prompt_mask, torch.ones((rows, limit), dtype=torch.bool, device=device)], 1)
    positions = position_ids(attention)
    cache: Any = None
    inputs, compact = prompt_ids, False
    for step in range(limit):
        seen = width + step
        if quick is not None and step:
            logits, hidden = quick(inputs[:, 0], positions[:, seen - 1], seen)
            if decoded is not None:
                decoded.hidden.append(hidden)
        elif cache is None and (read := read_once(model, prompt_ids, prompt_mask)) is not None:
            logits, cache = read
        else:
            output = model(
                input_ids=inputs,
                attention_mask=attention[:, :seen],
                position_ids=positions[:, seen - inputs.shape[1] : seen],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits, cache = output.logits[:, -1], output.past_key_values
        if not step:
            if quick is not None and not quick.begin(cache, attention):
                quick = None
            compact = quick is not None or reserve(cache, end)
        if decoded is not None:
            decoded.add(going, logits)
        tokens = pick_tokens(logits, noise[:, step], temperature)
        drawn.append((going, tokens))
        inputs = tokens.unsqueeze(1)
        if (step + 1) % STOP_TEST_EVERY:
            continue
        recent = torch.stack([tokens for _, tokens in drawn[-STOP_TEST_EVERY:]])
        alive &= ~torch.isin(recent, stops).any(0)
        left = int(alive.sum())
        if left == 0:
            break
        if compact and left <= COMPACT_BELOW * len(going):
            kept = alive.nonzero().squeeze(1)
            if quick is not None:
                quick.keep(kept)
            else:
                cache.batch_select_indices(kept)
            going, alive, noise, attention, positions, inputs = (
                x.index_select(0, kept) for x in (going, alive, noise, attention, positions, inputs)
            )
    return _until_stop(drawn, rows, stops, pad_id)


def _until_stop(drawn: list[tuple[Tensor, Tensor]], rows: int, stops: Tensor, pad_id: int) -> Sampled:
    """Responses from the tokens of each step: what comes behind a row's first stop is left out."""
    ids = torch.full((rows, len(drawn)), pad_id, dtype=torch.long, device=stops.device)
    for column, (going, tokens) in enumerate(drawn):
        ids[going, column] = tokens
    stop = torch.isin(ids, stops)  # a pad token may be one, but stands behind the first only
    mask = stop.long().cumsum(1) - stop.long() == 0
    length = int(mask.sum(1).max())
    return Sampled(ids.masked_fill_(~mask, pad_id)[:, :length], mask[:, :length], stop.any(1))
