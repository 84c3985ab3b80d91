"""Perplexity of held-out texts, by windows that overlap by half."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlhf_kl.errors import InputError, blame
from rlhf_kl.models.lm import LM, negative_log_likelihood
from rlhf_kl.models.pretrained import check_tokens, context_length
from rlhf_kl.models.tokens import encode_all, first_token_bytes
from rlhf_kl.ops.packing import group_lengths, idle_pass, pass_overhead
from rlhf_kl.sharding import equally_many, has_shards

ROWS = 32
MOST_TOKENS = 1 << 15  # of a pass, padding included
DEFAULT_WINDOW = 1024  # for a model whose config names no context length


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of documents, token-weighted. The field names are the keys of `eval --json`."""

    perplexity: float
    nats_per_token: float
    bits_per_byte: float  # UTF-8 bytes
    tokens: int  # scored ones
    bytes: int  # of the scored tokens
    documents: int


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[list[int], int]]:
    """Windows of at most `size` tokens that overlap by half, each token but the first scored once.

    A window: the tokens that are read, and the place of the first that is scored. The first token of a document has no
    context, so it is never scored.
    """
    start, scored = 0, 1
    while scored < len(ids):
        end = min(len(ids), start + size)
        yield list(ids[start:end]), scored - start
        scored = end
        start = end - size // 2


class TextSums(NamedTuple):
    """The sums behind the perplexity of some documents."""

    nats: float
    bytes: int
    each: list[tuple[float, int]]  # nats and tokens of each document


@torch.no_grad()
def text_sums(
    lm: LM,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    rows: int = ROWS,
    advance: Callable[[int], None] | None = None,
) -> TextSums:
    """Sums over some documents: with a bos in front if the tokenizer has one; eos is not scored.

    Without a bos a document's first token has no context: neither its nats nor its bytes count.
    `rows` in one pass; `advance(n)` is called after every n windows. Of a sharded model: inside of `layer_by_layer`.
    Errors: InputError for a token that is not the model's.
    """
    limit = context_length(lm.model) or DEFAULT_WINDOW
    encoded = encode_all(tokenizer, texts, bos=True)
    with blame("held-out texts"):
        check_tokens(lm.model, tokenizer, encoded)
    pieces = [(place, *window) for place, ids in enumerate(encoded) for window in windows(ids, limit)]
    nats = [0.0] * len(texts)

    total = 0.0
    groups = group_lengths(
        [len(window) for _, window, _ in pieces],
        most_rows=rows,
        most_tokens=MOST_TOKENS,
        overhead=pass_overhead(lm.device),
    )
    device = lm.device
    for group in equally_many(groups, [], device) if has_shards(lm) else groups:
        if not group:
            lm(idle_pass(device))
            continue
        places, windowed, firsts = zip(*(pieces[i] for i in group), strict=True)
        losses = negative_log_likelihood(lm, windowed, firsts)
        parts = losses.cpu().split([len(row) - first for row, first in zip(windowed, firsts, strict=True)])
        for place, part in zip(places, parts, strict=True):
            nats[place] += float(part.sum())
        total += float(losses.sum())
        if advance:
            advance(len(windowed))
    size = sum(len(text.encode()) - first_token_bytes(tokenizer, text) for text in texts)
    return TextSums(total, size, [(loss, max(0, len(ids) - 1)) for loss, ids in zip(nats, encoded, strict=True)])


def safe_exp(nats: float) -> float:
    """exp(nats per token); infinite where that overflows."""
    return math.exp(nats) if nats < 700 else math.inf


def perplexity_of(parts: Sequence[TextSums]) -> Perplexity:
    """exp(total nll / total scored tokens) of all documents together. Errors: InputError if no token was scored."""
    total, size = sum(part.nats for part in parts), sum(part.bytes for part in parts)
    tokens = [count for part in parts for _, count in part.each]
    count = sum(tokens)
    if not count:
        raise InputError("eval.texts: no document has a token to score")
    return Perplexity(
        perplexity=safe_exp(total / count),
        nats_per_token=total / count,
        bits_per_byte=total / math.log(2) / size,
        tokens=count,
        bytes=size,
        documents=len(tokens),
    )
