"""Sampling token by token, with temperature only: top-k or top-p would make the KL wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rlhf_kl.models.text import position_ids
from rlhf_kl.ops.head import Head, in_chunks
from rlhf_kl.ops.masked import WITHOUT_FLOAT64, float64
from rlhf_kl.ops.packing import SharedPrompts
from rlhf_kl.types import Sampled, Sampling

STOP_TEST_EVERY = {"cpu": 1, "cuda": 8}  # steps; reading the finished rows from a GPU makes it wait
COMPACT_BELOW = 0.8  # share of unfinished rows below which the finished ones are removed from the batch
GROWTH = 128  # tokens of space that a cache gets at a time


def pick_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: ids (B,) and their log-probs (B,) from logits (B, V) and numbers in [0, 1) (B,).

    The token is where the cumulative probability first exceeds the number: one random number per token, so
    runs with the same seed use the same noise for any policy.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cumulative = float64(logp.exp()).cumsum(-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_max(logits.shape[-1] - 1).to(logp.device)
    return ids.squeeze(1), logp.gather(1, ids).squeeze(1)


def decode(
    model: Any, head: Head, prompts: SharedPrompts, noise: Tensor, sampling: Sampling, *, keep_states: bool
) -> Sampled:
    """Responses of a `Trunk` with this head to prompts; a response ends with its first end-of-text token.

    `noise` (B, max_new_tokens) decides the tokens. Results are trimmed to the longest response. `keep_states`: the
    hidden states that tokens were drawn from are kept.
    """
    device, limit = prompts.ids.device, sampling.max_new_tokens
    hidden, cache, mask = model.read_prompts(prompts)
    width = mask.shape[1]
    reserve(cache, width + limit, model.dtype)
    ready = model.ready_masks
    stops = torch.tensor(sampling.eos_ids, device=device)
    test_every = STOP_TEST_EVERY.get(device.type, STOP_TEST_EVERY["cuda"])
    mask = torch.cat([mask, mask.new_ones(len(mask), limit)], 1)
    positions = position_ids(mask)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # a step each: rows (b,) in the batch, tokens, log-probs
    states: list[Tensor] = []  # a step each: (b, H)

    def pick(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return pick_tokens(logits, uniform, sampling.temperature)

    # Of the rows that are still in the batch:
    rows = tokens = torch.arange(len(mask), device=device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    noise = noise if device.type in WITHOUT_FLOAT64 else noise.to(device)
    for column in range(limit):
        if column:
            end = width + column
            seen = mask[:, None, None, :end] if ready else mask[:, :end]
            hidden, cache = model.step(tokens.unsqueeze(1), seen, positions[:, end - 1 : end], cache)
            hidden = hidden[:, -1]
        tokens, logprobs = in_chunks(pick, head, hidden, noise[:, column])
        drawn.append((rows, tokens, logprobs))
        if keep_states:
            states.append(hidden)
        if (column + 1) % test_every:
            continue
        recent = torch.stack([each for _, each, _ in drawn[-test_every:]])
        alive &= ~torch.isin(recent, stops).any(0)
        kept = alive.nonzero().squeeze(1)  # the one point of a test that waits for a GPU
        if len(kept) == 0:
            break
        if len(kept) <= COMPACT_BELOW * len(rows):
            cache.reorder_cache(kept)
            rows, alive, noise, tokens, mask, positions = (
                x.index_select(0, kept.to(x.device)) for x in (rows, alive, noise, tokens, mask, positions)
            )
    sampled = _until_stop(drawn, len(prompts.copies), stops, sampling.pad_id)
    return sampled._replace(states=_states_of(sampled.mask, drawn, states)) if keep_states else sampled


def _until_stop(drawn: list[tuple[Tensor, Tensor, Tensor]], rows: int, stops: Tensor, pad_id: int) -> Sampled:
    """Responses from the tokens of each step: tokens after a row's first stop token are left out."""
    ids = torch.full((rows, len(drawn)), pad_id, dtype=torch.long, device=stops.device)
    logprobs = torch.zeros(ids.shape, device=stops.device)
    for column, (live, tokens, chosen) in enumerate(drawn):
        ids[live, column], logprobs[live, column] = tokens, chosen
    stop = torch.isin(ids, stops)  # a pad token may be a stop token, but comes only after the first one
    mask = stop.long().cumsum(1) - stop.long() == 0
    length = int(mask.sum(1).max())
    ids, logprobs = ids.masked_fill(~mask, pad_id), logprobs.masked_fill(~mask, 0.0)
    return Sampled(ids[:, :length], mask[:, :length], stop.any(1), logprobs[:, :length])


def _states_of(mask: Tensor, drawn: list[tuple[Tensor, Tensor, Tensor]], states: list[Tensor]) -> Tensor:
    """The states (N, H) of the tokens that `mask` (B, T) keeps, row by row."""
    grid = states[0].new_zeros(*mask.shape, states[0].shape[-1])
    for column in range(mask.shape[1]):
        grid[drawn[column][0], column] = states[column]
    return grid[mask]


# ---- the key-value cache: space is reserved once, and finished rows are removed


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, (B, heads, length, size) each, written in place and in the dtype of the layers.

    The usual layer copies all its content for each new token; and RoPE makes its keys float32, which attention would
    then cast for each new token.
    """

    room: list[Tensor]  # keys and values, with space behind them
    end: int  # of them in it
    sliding_window: int | None = None  # tokens that the layer attends to, a new one included; None = all

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns the keys and values that they attend to."""
        start, new = self.end, key_states.shape[2]
        self.end = end = start + new
        if end > self.room[0].shape[2]:
            more = max(new, min(GROWTH, self.most - start))
            self.room = [torch.cat([x, x.new_empty(*x.shape[:2], more, x.shape[3])], 2) for x in self.room]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        first = 0 if self.sliding_window is None else max(0, start - self.sliding_window + 1)
        self.keys, self.values = (room[:, :, first:end] for room in self.room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows only."""
        self.room = [x.index_select(0, beam_idx) for x in self.room]
        self.keys, self.values = (room[:, :, : self.end] for room in self.room)


class ReservedWindow(ReservedLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The same for a layer that attends to the last tokens only; it keeps older ones, out of sight."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """See `ReservedLayer`."""
        self.cumulative_length += key_states.shape[2]
        return super().update(key_states, value_states)


RESERVED = {DynamicLayer: ReservedLayer, DynamicSlidingWindowLayer: ReservedWindow}


def reserve(cache: Any, most: int, dtype: torch.dtype) -> None:
    """Let the layers of a cache that a model has just filled grow in place, to at most `most` tokens.

    Layers of another kind (running states) are not changed.
    """
    for i, layer in enumerate(cache.layers if type(cache) is DynamicCache else ()):
        if type(layer) in RESERVED and layer.is_initialized:
            grows = cache.layers[i] = RESERVED[type(layer)].__new__(RESERVED[type(layer)])
            grows.__dict__.update(layer.__dict__)
            grows.most, grows.end = most, layer.keys.shape[2]
            grows.keys, grows.values = grows.room = [x.to(dtype) for x in (layer.keys, layer.values)]


def attends_to_everything(config: Any) -> bool:
    """Whether every layer of a model attends to all previous tokens, without a window."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def keeps_each_token(config: Any) -> bool:
    """Whether every layer of a model keeps the keys and values of single tokens, not a running state (as Mamba)."""
    return all(type(layer) in RESERVED for layer in DynamicCache(config=config).layers)
