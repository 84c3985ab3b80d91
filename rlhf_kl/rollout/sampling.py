"""Sampling from the policy: temperature only, no top-k, no top-p, or the KL would be wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.kernels.build import library
from rlhf_kl.kernels.logits import plain_matrix, sample
from rlhf_kl.rollout.decoded import DecodedStates
from rlhf_kl.rollout.decoding import decoding_of

STOP_TEST_EVERY = {"cpu": 1, "cuda": 4}  # steps; asking a GPU which rows are done makes it wait
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
    if plain_matrix(logits) and library() is not None:
        return sample(logits, uniform, temperature)
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
    device, limit = prompt_ids.device, uniforms.shape[1]
    decoding = decoding_of(model, prompt_ids, prompt_mask, limit, kept=decoded is not None)
    stops = torch.tensor(eos_ids, device=device)
    test_every = STOP_TEST_EVERY.get(device.type, STOP_TEST_EVERY["cuda"])
    drawn: list[tuple[Tensor, Tensor]] = []  # a step each: the rows (b,) in the batch and their tokens (b,)

    # Of the rows that are still in the batch:
    going = torch.arange(len(prompt_ids), device=device)
    alive = torch.ones(len(prompt_ids), dtype=torch.bool, device=device)
    noise, tokens = uniforms.to(device), going
    with decoded.listening(model) if decoded is not None else nullcontext():
        for step in range(limit):
            logits, hidden = decoding.next(tokens) if step else decoding.first()
            if decoded is not None:
                decoded.add(going, logits, hidden)
            tokens = pick_tokens(logits, noise[:, step], temperature)
            drawn.append((going, tokens))
            if (step + 1) % test_every:
                continue
            recent = torch.stack([each for _, each in drawn[-test_every:]])
            alive &= ~torch.isin(recent, stops).any(0)
            left = int(alive.sum())
            if left == 0:
                break
            if decoding.lets_go and left <= COMPACT_BELOW * len(going):
                kept = alive.nonzero().squeeze(1)
                decoding.keep(kept)
                going, alive, noise, tokens = (x.index_select(0, kept) for x in (going, alive, noise, tokens))
    return _until_stop(drawn, len(prompt_ids), stops, pad_id)


def _until_stop(drawn: list[tuple[Tensor, Tensor]], rows: int, stops: Tensor, pad_id: int) -> Sampled:
    """Responses from the tokens of each step: what comes behind a row's first stop is left out."""
    ids = torch.full((rows, len(drawn)), pad_id, dtype=torch.long, device=stops.device)
    for column, (going, tokens) in enumerate(drawn):
        ids[going, column] = tokens
    stop = torch.isin(ids, stops)  # a pad token may be one, but stands behind the first only
    mask = stop.long().cumsum(1) - stop.long() == 0
    length = int(mask.sum(1).max())
    return Sampled(ids.masked_fill_(~mask, pad_id)[:, :length], mask[:, :length], stop.any(1))
