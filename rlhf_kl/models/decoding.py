"""Sampling token by token, with temperature only: top-k or top-p would make the KL wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rlhf_kl.hub import first_line
from rlhf_kl.memory import memory_is_full
from rlhf_kl.models.tokens import position_ids
from rlhf_kl.ops.head import Head, in_chunks
from rlhf_kl.ops.masked import WITHOUT_FLOAT64, float64
from rlhf_kl.ops.packing import SharedPrompts, send
from rlhf_kl.types import Sampled, Sampling

STOP_TEST_EVERY = {"cpu": 1, "cuda": 8}  # steps; reading the finished rows from a GPU makes it wait
# Share of unfinished rows below which the finished ones are removed from the batch; a GPU captures its step again then.
COMPACT_BELOW = {"cpu": 0.8, "cuda": 0.5}
GROWTH = 128  # tokens of space that a cache gets at a time
ALIGNED = 8  # keys, as the kernels of attention take a mask


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
    ends = torch.tensor(sampling.eos_ids)
    (stops,) = send(device, ends)
    test_every = STOP_TEST_EVERY.get(device.type, STOP_TEST_EVERY["cuda"])
    compact_below = COMPACT_BELOW.get(device.type, COMPACT_BELOW["cuda"])
    mask = torch.cat([mask, mask.new_ones(len(mask), limit)], 1)
    steps = (FixedSteps if takes_fixed_shapes(model, cache) else Steps)(model, cache, mask)
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # a step each: rows (b,) in the batch, tokens, log-probs
    states: list[Tensor] = []  # a step each: (b, H)

    def pick(hidden: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return pick_tokens(head.logits(hidden), uniform, sampling.temperature)

    # Of the rows that are still in the batch:
    rows = tokens = torch.arange(len(mask), device=device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    noise = noise if device.type in WITHOUT_FLOAT64 else send(device, noise)[0]
    for column in range(limit):
        if column:
            hidden = steps(tokens, width + column)
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
        if len(kept) <= compact_below * len(rows):
            steps.keep(kept)
            rows, alive, noise, tokens = (x.index_select(0, kept.to(x.device)) for x in (rows, alive, noise, tokens))
    sampled = _until_stop(drawn, len(prompts.copies), ends, sampling.pad_id)
    return sampled._replace(states=_states_of(sampled.mask, drawn, states)) if keep_states else sampled


def _until_stop(drawn: list[tuple[Tensor, Tensor, Tensor]], rows: int, stops: Tensor, pad_id: int) -> Sampled:
    """Responses from the tokens of each step: tokens after a row's first stop token are left out."""
    ids = torch.full((rows, len(drawn)), pad_id, dtype=torch.long, device=drawn[0][1].device)
    logprobs = torch.zeros(ids.shape, device=ids.device)
    for column, (live, tokens, chosen) in enumerate(drawn):
        ids[live, column], logprobs[live, column] = tokens, chosen
    ids, logprobs = ids.cpu(), logprobs.cpu()
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
    (kept,) = send(grid.device, mask.flatten().nonzero().squeeze(1))
    return grid.flatten(0, 1).index_select(0, kept)


# ---- steps


class Steps:
    """The hidden states (b, H) that the rows' next tokens are drawn from."""

    def __init__(self, model: Any, cache: Any, mask: Tensor) -> None:
        """`mask` (B, L): of the prompts and of all tokens to come."""
        self.model, self.cache, self.mask, self.positions = model, cache, mask, position_ids(mask)

    def __call__(self, tokens: Tensor, end: int) -> Tensor:
        """Read the rows' last tokens (b,), in column `end - 1`."""
        seen = self.mask[:, None, None, :end] if self.model.ready_masks else self.mask[:, :end]
        hidden, self.cache = self.model.step(tokens.unsqueeze(1), seen, self.positions[:, end - 1 : end], self.cache)
        return hidden[:, -1]  # type: ignore[no-any-return]

    def keep(self, kept: Tensor) -> None:
        """Go on with these rows only."""
        self.cache.reorder_cache(kept)
        self.mask, self.positions = (x.index_select(0, kept) for x in (self.mask, self.positions))


class FixedSteps(Steps):
    """Steps whose tensors keep their shapes and places, so that a GPU replays one as a CUDA graph.

    A GPU computes a step of a small model faster than Python starts its kernels. Shapes change where the cache grows
    or rows leave; the step is then captured again, which takes the time of two.
    """

    replay: Callable[[], None] | None = None

    def __call__(self, tokens: Tensor, end: int) -> Tensor:
        """See `Steps`."""
        if self.replay is None or end > self.seen.shape[-1]:
            self._fix(tokens, end)
        self.tokens.copy_(tokens.unsqueeze(1))
        self.now.copy_(self.positions[:, end - 1 : end])
        self.place.fill_(end - 1)
        self.seen[..., end - 1] = True
        assert self.replay is not None
        self.replay()
        hidden: Tensor = self.hidden.clone()
        return hidden

    def keep(self, kept: Tensor) -> None:
        """See `Steps`."""
        super().keep(kept)
        self.replay = None

    def _fix(self, tokens: Tensor, end: int) -> None:
        """New tensors, with room for further tokens."""
        room = min(end + GROWTH, self.mask.shape[1])
        room += -room % ALIGNED
        self.place = torch.full((1,), end - 1, device=tokens.device)
        for layer in self.cache.layers:
            layer.fix(room, self.place)
        self.tokens, self.now = tokens.unsqueeze(1).clone(), self.positions[:, end - 1 : end].clone()
        self.seen = self.mask.new_zeros(len(self.mask), 1, 1, room)
        self.seen[..., :end] = self.mask[:, None, None, :end]

        def step() -> None:
            self.hidden = self.model.step(self.tokens, self.seen, self.now, self.cache)[0][:, -1]

        self.replay = step
        if tokens.is_cuda:
            try:
                self.replay = captured(step)
            except RuntimeError as error:  # a model that waits for the GPU
                if memory_is_full(error):
                    raise
                self.model.give_up_graphs(first_line(error))


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """What replays a step as a CUDA graph. Errors: RuntimeError if it cannot be captured."""
    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # once before, since libraries allocate at their first call
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph.replay


@cache
def side_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps 32 MiB for each stream."""
    return torch.cuda.Stream()


def takes_fixed_shapes(model: Any, cache: Any) -> bool:
    """Whether the steps of a model may be `FixedSteps`: on a GPU, if all its layers attend to all tokens."""
    if model.device.type != "cuda" or not model.ready_masks or not model.graphs:
        return False
    return all(type(layer) is ReservedLayer for layer in cache.layers)


# ---- the key-value cache: space is reserved once, and finished rows are removed


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, (B, heads, length, size) each, written in place and in the dtype of the layers.

    The usual layer copies all its content for each new token; and RoPE makes its keys float32, which attention would
    then cast for each new token.
    """

    room: list[Tensor]  # keys and values, with space behind them
    end: int  # of them in it
    place: Tensor | None = None  # of the next token, (1,), where shapes are fixed
    sliding_window: int | None = None  # tokens that the layer attends to, a new one included; None = all

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns the keys and values that they attend to, all of the room where shapes are fixed."""
        if self.place is not None:
            for room, states in zip(self.room, (key_states, value_states), strict=True):
                room.index_copy_(2, self.place, states.to(room.dtype))
            return self.room[0], self.room[1]
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

    def fix(self, size: int, place: Tensor) -> None:
        """Have room for this many tokens, and write the next one at `place`."""
        shape = *self.room[0].shape[:2], size, self.room[0].shape[3]
        grown = [x.new_zeros(shape) for x in self.room]  # zeros: what a mask hides must be finite
        for x, old in zip(grown, self.room, strict=True):
            kept = min(size, old.shape[2])
            x[:, :, :kept] = old[:, :, :kept]
        self.room, self.place = grown, place
        self.keys, self.values = grown


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
