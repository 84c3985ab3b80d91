"""Prompts in an endless order that depends only on the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kl.config.schema.sections import chat_problems, refuse
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.chat import chat_prompt, require_chat_template, turns_of
from rlhf_kl.data.rows import PromptRow
from rlhf_kl.errors import InputError
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.seeding import shuffled
from rlhf_kl.types import Prompts
from rlhf_kl.ui import log


def prepare_prompts(
    prompts: Sequence[PromptRow], tokenizer: Any, room: int | None, form: PromptsSection
) -> tuple[Prompts, str]:
    """The prompts with their tokens, and a note about those left out.

    They are empty, or longer than `room` (None = no limit), or the tokenizer knows none of their characters.
    Errors: InputError where no prompt is left.
    """
    if room is not None and room < 1:
        raise InputError(f"rollout.max_new_tokens takes the whole context of the model: lower it by {1 - room} or more")
    chat = uses_template(form, prompts, tokenizer)
    if chat:
        require_chat_template(tokenizer, "data.chat_template", form.chat_options)
    full = [prompt for prompt in prompts if prompt.text.strip()]
    empty = len(prompts) - len(full)
    if not chat:
        full = [prompt for prompt in full if len(prompt.messages) <= 1]
    several = len(prompts) - empty - len(full)
    if form.first_tokens is not None:
        full = _beginnings(full, tokenizer, form.first_tokens)
    if chat:
        written = [chat_prompt(tokenizer, each.messages or each.text, form.system, form.chat_options) for each in full]
    else:
        written = [prompt.text for prompt in full]
    ids = encode_all(tokenizer, written, bos=False if chat else None)  # a template writes its bos itself
    short = [i for i, row in enumerate(ids) if room is None or len(row) <= room]
    bos, begins = tokenizer.bos_token, [tokenizer.bos_token_id]  # a prompt may be a bos alone, where it is written
    fitting = [i for i in short if ids[i] and (ids[i] != begins or bos in written[i])]
    long, unknown = len(full) - len(short), len(short) - len(fitting)
    reasons = [f"{empty} empty"] if empty else []
    if several:
        reasons.append(f"{several} of several turns without a chat template")
    if long:
        reasons.append(f"{long} longer than the {room} tokens that the context leaves beside rollout.max_new_tokens")
    if unknown:
        reasons.append(f"{unknown} of which the policy's tokenizer makes no tokens")
    if not fitting:
        raise InputError(f"none of {len(prompts)} prompts can be used: {', '.join(reasons)}")
    left_out = len(prompts) - len(fitting)
    note = f"{left_out} of {len(prompts)} prompts left out: {', '.join(reasons)}" if reasons else ""
    texts, rows, messages = (list(column) for column in zip(*full, strict=True))
    return Prompts(texts, ids, rows, messages, written if chat else []).pick(fitting), note


def uses_template(form: PromptsSection, prompts: Sequence[PromptRow], tokenizer: Any) -> bool:
    """Whether these prompts are written with the tokenizer's chat template."""
    if form.chat_template == "auto":
        return bool(tokenizer.chat_template) and any(prompt.messages for prompt in prompts)
    return form.chat_template


def resolved_form(form: PromptsSection, prompts: Sequence[PromptRow], tokenizer: Any) -> PromptsSection:
    """The form in which a run writes all its prompts, by those that it trains on.

    Errors: InputError for what only a chat template reads, where none is used.
    """
    chat = uses_template(form, prompts, tokenizer)
    refuse(*chat_problems(form.system, form.chat_options, chat))
    if form.chat_template == "auto" and tokenizer.chat_template:
        kind, use = ("conversations", "used") if chat else ("plain texts", "not used")
        log.info(f"data.prompts are {kind}: the tokenizer's chat template is {use} (data.chat_template: auto)")
    return form.model_copy(update={"chat_template": chat})


def _beginnings(prompts: Sequence[PromptRow], tokenizer: Any, count: int) -> list[PromptRow]:
    if any(len(prompt.messages) > 1 for prompt in prompts):
        raise InputError("data.first_tokens cannot cut conversations of several turns")
    rows = encode_all(tokenizer, [prompt.text for prompt in prompts], bos=False)
    cut: list[str] = tokenizer.batch_decode([row[:count] for row in rows], clean_up_tokenization_spaces=False)
    return [
        PromptRow(short, prompt.row, turns_of(short) if prompt.messages else ())
        for short, prompt in zip(cut, prompts, strict=True)
    ]


class PromptStream:
    """Prompts in an endless order, shuffled anew in each pass: it depends only on the seed and the step."""

    def __init__(self, table: Prompts, batch_size: int, seed: int, samples: int = 1) -> None:
        """`samples`: responses to each prompt, neighbours in a batch; divides `batch_size`."""
        self.table, self.batch_size, self.seed, self.samples = table, batch_size, seed, samples
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self.table)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.table.ids))

    def batch(self, step: int, offset: int = 0, rows: int | None = None) -> Prompts:
        """Prompts `offset` to `offset + rows` of the global batch of a step (steps count from 1)."""
        start = (step - 1) * self.batch_size + offset
        places = range(start, start + (rows or self.batch_size))
        return self.table.pick([self._index(place // self.samples) for place in places])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self), self.seed, "prompts", epoch).tolist()
        return self._order[place]
