"""Prompts in an endless order that depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kl.errors import InputError
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.seeding import shuffled
from rlhf_kl.types import PromptBatch


class PromptStream:
    """Tokenised prompts, shuffled anew each time all have been seen.

    Two runs with one seed see the same prompts in the same order, whatever else differs, and a resumed run
    goes on where it stopped: the order is a function of the step.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, batch_size: int, seed: int) -> None:
        self.texts, self.batch_size, self.seed = list(texts), batch_size, seed
        self.rows = encode_all(tokenizer, self.texts)
        self.pad_id: int = tokenizer.pad_token_id
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, step: int, offset: int = 0, rows: int | None = None) -> PromptBatch:
        """Prompts `offset` to `offset + rows` of the global batch of a step (steps count from 1)."""
        start = (step - 1) * self.batch_size + offset
        return self.pick([self._index(i) for i in range(start, start + (rows or self.batch_size))])

    def pick(self, indices: Sequence[int]) -> PromptBatch:
        """The prompts with these indices, left-padded."""
        ids, mask = pad([self.rows[i] for i in indices], self.pad_id, left=True)
        return PromptBatch([self.texts[i] for i in indices], ids, mask)

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.texts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self.texts), self.seed, "prompts", epoch).tolist()
        return self._order[place]


def check_prompts(texts: Sequence[str], rows: Sequence[Sequence[int]], room: int | None, where: str) -> None:
    """Errors: InputError for an empty prompt or one longer than `room` tokens (context less new tokens)."""
    empty = [i for i, text in enumerate(texts, 1) if not text.strip()]
    if empty:
        raise InputError(f"{where}: {len(empty)} of {len(texts)} prompts are empty, the first in row {empty[0]}")
    if room is None:
        return
    if room < 1:
        raise InputError(f"rollout.max_new_tokens: leaves no room for a prompt in the model's context ({room} tokens)")
    long = [i for i, row in enumerate(rows, 1) if len(row) > room]
    if long:
        size = len(rows[long[0] - 1])
        raise InputError(
            f"{where}: {len(long)} of {len(texts)} prompts are too long: row {long[0]} has {size} tokens, "
            f"the context leaves {room} beside rollout.max_new_tokens"
        )
