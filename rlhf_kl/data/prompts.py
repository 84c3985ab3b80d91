"""Prompts in an endless order that depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_kl.data.chat import chat_prompt, require_chat_template, several_turns, with_row
from rlhf_kl.data.files import broken_text
from rlhf_kl.errors import InputError
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.seeding import shuffled
from rlhf_kl.types import PromptBatch


@dataclass(frozen=True)
class PromptFormat:
    """How a prompt becomes tokens."""

    chat: bool = False  # as a user turn in the tokenizer's chat template
    system: str | None = None
    first_tokens: int | None = None  # keep only this many from its start
    options: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template


@dataclass(frozen=True)
class Prompts:
    """Usable prompts: texts for reward functions, and tokens for the policy."""

    texts: list[str]
    rows: list[list[int]]
    note: str = ""  # about prompts that were left out

    def __len__(self) -> int:
        return len(self.texts)


def prepare_prompts(
    texts: Sequence[str], tokenizer: Any, room: int | None, form: PromptFormat | None = None
) -> Prompts:
    """Encode prompts, and leave out those that are empty or longer than `room` tokens (None = no limit).

    Errors: InputError where no prompt is left.
    """
    form = form or PromptFormat()
    if room is not None and room < 1:
        raise InputError(f"rollout.max_new_tokens takes the whole context of the model: lower it by {1 - room} or more")
    if form.chat:
        require_chat_template(tokenizer, "data.chat_template", form.options)
    if broken := next(filter(broken_text, texts), None):  # of a command line; files are checked as they are read
        raise InputError(f"is no UTF-8 text: {broken[-60:]!r}")
    full = [text for text in texts if text.strip()]
    empty = len(texts) - len(full)
    usable = full
    if form.first_tokens is not None:
        if any(map(several_turns, usable)):
            raise InputError("data.first_tokens cannot cut conversations of several turns")
        usable = _beginnings(usable, tokenizer, form.first_tokens)
    written = [chat_prompt(tokenizer, text, form.system, form.options) for text in usable] if form.chat else usable
    rows = encode_all(tokenizer, written, bos=False if form.chat else None)  # a template writes its bos itself
    fitting = [i for i, row in enumerate(rows) if room is None or len(row) <= room]
    long = len(full) - len(fitting)
    reasons = [f"{empty} empty"] if empty else []
    if long:
        reasons.append(f"{long} longer than the {room} tokens that the context leaves beside rollout.max_new_tokens")
    if not fitting:
        raise InputError(f"none of {len(texts)} prompts can be used: {', '.join(reasons)}")
    note = f"{empty + long} of {len(texts)} prompts left out: {', '.join(reasons)}" if reasons else ""
    return Prompts([usable[i] for i in fitting], [rows[i] for i in fitting], note)


def _beginnings(texts: Sequence[str], tokenizer: Any, count: int) -> list[str]:
    rows = encode_all(tokenizer, texts, bos=False)
    cut: list[str] = tokenizer.batch_decode([row[:count] for row in rows], clean_up_tokenization_spaces=False)
    return [
        with_row(short, getattr(text, "row", {}), messages=bool(getattr(text, "messages", ())))
        for short, text in zip(cut, texts, strict=True)
    ]


class PromptStream:
    """Tokenised prompts, shuffled anew in each pass: the order depends only on the seed and the step."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: Any,
        batch_size: int,
        seed: int,
        rows: Sequence[list[int]] | None = None,
        samples: int = 1,
    ) -> None:
        """`samples`: responses to each prompt, neighbours in a batch; divides `batch_size`."""
        self.texts, self.batch_size, self.seed = list(texts), batch_size, seed
        self.rows = encode_all(tokenizer, self.texts) if rows is None else list(rows)
        self.samples = samples
        self.pad_id: int = tokenizer.pad_token_id
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row) for row in self.rows)

    def batch(self, step: int, offset: int = 0, rows: int | None = None) -> PromptBatch:
        """Prompts `offset` to `offset + rows` of the global batch of a step (steps count from 1)."""
        start = (step - 1) * self.batch_size + offset
        return self.pick([self._index(i // self.samples) for i in range(start, start + (rows or self.batch_size))])

    def pick(self, indices: Sequence[int]) -> PromptBatch:
        """The prompts with these indices, left-padded."""
        ids, mask = pad([self.rows[i] for i in indices], self.pad_id, left=True)
        return PromptBatch([self.texts[i] for i in indices], ids, mask)

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.texts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self.texts), self.seed, "prompts", epoch).tolist()
        return self._order[place]
