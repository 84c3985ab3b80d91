"""Between text and padded batches of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

AS_WRITTEN = {"clean_up_tokenization_spaces": False}  # of a decoding: without it some put "n't" for " n't"


def adds_bos(tokenizer: Any) -> bool:
    """Whether a call of the tokenizer puts a bos in front of a text; some have a bos and do not (GPT-2, Pythia)."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def encode(tokenizer: Any, text: str, *, bos: bool | None = None) -> list[int]:
    """`encode_all` for one text."""
    return encode_all(tokenizer, [text], bos=bos)[0]


def encode_all(tokenizer: Any, texts: Sequence[str], *, bos: bool | None = None) -> list[list[int]]:
    """Token ids of texts, without other special tokens than those that a text holds.

    `bos`: whether each row starts with a bos, if the tokenizer has one, and never with two; None = `adds_bos`.
    """
    if not texts:
        return []
    # Long texts are read in windows or left out, so no warning of transformers is needed.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id if bos or (bos is None and adds_bos(tokenizer)) else None
    return [row if start is None or row[:1] == [start] else [start, *row] for row in rows]


def first_token_bytes(tokenizer: Any, text: str) -> int:
    """UTF-8 bytes of the first token in a text's row; 0 if that is an added bos."""
    bos = tokenizer.bos_token
    if bos is not None:
        return len(bos.encode()) if text.startswith(bos) else 0
    first: str = tokenizer.decode(encode(tokenizer, text, bos=True)[:1], **AS_WRITTEN)
    return len(first.encode())


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of ids as (ids (B, L) long, mask (B, L) bool); the mask comes from the lengths."""
    width = max(1, max(len(row) for row in rows))
    gaps = [[pad_id] * (width - len(row)) for row in rows]
    ids = [[*gap, *row] if left else [*row, *gap] for gap, row in zip(gaps, rows, strict=True)]
    lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
    columns = torch.arange(width)
    return torch.tensor(ids, dtype=torch.long), columns >= width - lengths if left else columns < lengths


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, L) that count real tokens only, so that left padding does not shift them."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def decode_responses(tokenizer: Any, rows: Sequence[Sequence[int]], eos_ids: Sequence[int]) -> list[str]:
    """Texts of responses; without eos, pad and bos, but with other special tokens.

    One of the `eos_ids` may be an ordinary token, such as a line break: that is a part of the text.
    """
    ends = [token for token in eos_ids if token in tokenizer.added_tokens_decoder]
    apart = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, *ends}
    return decode_behind(tokenizer, [[token for token in row if token not in apart] for row in rows])


def special_ids(tokenizer: Any) -> set[int]:
    """Added tokens that are special, or that the chat template writes, as some do `<think>`; no blanks."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.special or (token.content.strip() and token.content in template)}


def text_of_each(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token alone adds to the text of a prompt; the bytes of a part of a character (`<0xF0><0x9F>`)."""
    numbers = {char: byte for byte, char in bytes_to_unicode().items()}
    texts = decode_behind(tokenizer, [[each] for each in ids])
    for place, name in enumerate(tokenizer.convert_ids_to_tokens(list(ids))):
        if not texts[place]:
            texts[place] = name or f"#{ids[place]}"
        elif "\ufffd" in texts[place]:  # the name is as above, or has a sign for each byte
            known = not name.isascii() and {*name} <= {*numbers}
            texts[place] = "".join(f"<0x{numbers[char]:02X}>" for char in name) if known else name
    return texts


# ---- what tokens are behind a prompt: at the start of a text many tokenizers (Llama's, Mistral's) drop a space ----

FRONTS = ("a", ".", "\n", "0")  # texts that stand for a prompt


def decode_behind(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """What each row of ids adds to the text of a prompt in front of it."""
    front = encode_all(tokenizer, FRONTS[:1], bos=False)[0]
    whole: list[str] = tokenizer.batch_decode([front, *([*front, *row] for row in rows)], **AS_WRITTEN)
    start, *texts = whole
    return [text[len(start) :] for text in texts]


def encode_behind(tokenizer: Any, text: str) -> list[int]:
    """The ids that add `text` to a prompt in front of it; those of the text alone where the tokenizer has no such."""
    both = encode_all(tokenizer, [each for front in FRONTS for each in (front, front + text)], bos=False)
    for front, whole in zip(both[::2], both[1::2], strict=True):
        row = whole[len(front) :]
        if whole[: len(front)] == front and decode_behind(tokenizer, [row]) == [text]:
            return row
    return encode(tokenizer, text, bos=False)
