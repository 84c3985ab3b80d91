"""Token by token: temperature only, no top-k, no top-p, or the KL would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.models.cache import reserve
from rlhf_kl.models.logits import Logits
from rlhf_kl.models.text import position_ids
from rlhf_kl.types import Sampled, Sampling

STOP_TEST_EVERY = {"cpu": 1, "cuda": 4}  # steps; asking a GPU which rows are done makes it wait
COMPACT_BELOW = 0.8  # share of unfinished rows at which the finished ones leave the batch

Step = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]  # ids, mask, positions, cache -> hidden, cache


def pick_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: ids (B,) and their log-probs (B,) from logits (B, V) and numbers in [0, 1) (B,).

    The token is where the cumulative probability first exceeds the number: one random number a token, so
    runs with the same seed see the same noise whatever their policies do.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cumulative = logp.exp().double().cumsum(-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max(logits.shape[-1] - 1)
    return ids.squeeze(1), logp.gather(1, ids).squeeze(1)


def decode(
    step: Step,
    logits: Callable[[Tensor], Logits],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    noise: Tensor,
    sampling: Sampling,
) -> Sampled:
    """Responses to left-padded prompts (B, P); a response ends with its first end-of-text token.

    `step` advances the model by some tokens, `logits` reads its hidden states (b, H), `noise` (B, max_new_tokens)
    decides the tokens. Results are trimmed to the longest response.
    """
    device, limit = prompt_ids.device, sampling.max_new_tokens
    width = prompt_ids.shape[1]
    stops = torch.tensor(sampling.eos_ids, device=device)
    test_every = STOP_TEST_EVERY.get(device.type, STOP_TEST_EVERY["cuda"])
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_ids), limit)], 1)
    positions = position_ids(mask)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # a step each: rows (b,) in the batch, tokens, log-probs

    def pick(x: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        return pick_tokens(x, noise[at, column], sampling.temperature)

    # Of the rows that are still in the batch:
    rows = tokens = torch.arange(len(prompt_ids), device=device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    noise = noise.to(device)
    hidden, cache = _read_prompts(step, prompt_ids, prompt_mask, positions[:, :width])
    can_drop_rows = reserve(cache, width + limit)
    for column in range(limit):
        if column:
            end = width + column
            hidden, cache = step(tokens.unsqueeze(1), mask[:, :end], positions[:, end - 1 : end], cache)
        tokens, logprobs = logits(hidden).map(pick)
        drawn.append((rows, tokens, logprobs))
        if (column + 1) % test_every:
            continue
        recent = torch.stack([each for _, each, _ in drawn[-test_every:]])
        alive &= ~torch.isin(recent, stops).any(0)
        left = int(alive.sum())
        if left == 0:
            break
        if can_drop_rows and left <= COMPACT_BELOW * len(rows):
            kept = alive.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, alive, noise, tokens, mask, positions = (
                x.index_select(0, kept) for x in (rows, alive, noise, tokens, mask, positions)
            )
    return _until_stop(drawn, len(prompt_ids), stops, sampling.pad_id)


def _read_prompts(step: Step, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    """Hidden states (B, H) behind the prompts, and the cache; prompts that are the same are read once."""
    keys = [tuple(row) for row in torch.where(mask, ids, -1).tolist()]
    first: dict[tuple[int, ...], int] = {}
    copies = torch.tensor([first.setdefault(key, len(first)) for key in keys], device=ids.device)
    if len(first) == len(ids):
        return step(ids, mask, positions, None)
    once = torch.tensor([keys.index(key) for key in first], device=ids.device)
    hidden, cache = step(ids[once], mask[once], positions[once], None)
    cache.batch_select_indices(copies)
    return hidden.index_select(0, copies), cache


def _until_stop(drawn: list[tuple[Tensor, Tensor, Tensor]], rows: int, stops: Tensor, pad_id: int) -> Sampled:
    """Responses from the tokens of each step: what comes behind a row's first stop is left out."""
    ids = torch.full((rows, len(drawn)), pad_id, dtype=torch.long, device=stops.device)
    logprobs = torch.zeros(ids.shape, device=stops.device)
    for column, (live, tokens, chosen) in enumerate(drawn):
        ids[live, column], logprobs[live, column] = tokens, chosen
    stop = torch.isin(ids, stops)  # a pad token may be one, but stands behind the first only
    mask = stop.long().cumsum(1) - stop.long() == 0
    length = int(mask.sum(1).max())
    ids, logprobs = ids.masked_fill(~mask, pad_id), logprobs.masked_fill(~mask, 0.0)
    return Sampled(ids[:, :length], mask[:, :length], stop.any(1), logprobs[:, :length])
