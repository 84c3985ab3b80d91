"""Between text and padded batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def encode(tokenizer: Any, text: str, *, bos: bool = True) -> list[int]:
    """Token ids of a text; the bos token, where the tokenizer has one, stands in front exactly once."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if bos and tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    return ids


def encode_all(tokenizer: Any, texts: Sequence[str], *, bos: bool = True) -> list[list[int]]:
    """`encode` for many texts in one call of the tokenizer."""
    if not texts:
        return []
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id if bos else None
    return [row if start is None or row[:1] == [start] else [start, *row] for row in rows]


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of ids as (ids (B, L) long, mask (B, L) bool); the mask comes from the lengths."""
    width = max(1, max(len(row) for row in rows))
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.long)
        mask[i, place] = True
    return ids, mask


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, L) that count real tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def decode_responses(tokenizer: Any, ids: Tensor, mask: Tensor) -> list[str]:
    """Texts of responses (B, T) without special tokens."""
    rows = [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts
