"""Prompts as the policy reads them: written with a chat template or as they are, cut, and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_kl.data.chat import chat_prompt, require_chat_template, turns_of
from rlhf_kl.data.rows import PromptRow
from rlhf_kl.errors import InputError
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.types import Prompts


def prepare_prompts(
    prompts: Sequence[PromptRow],
    tokenizer: Any,
    room: int | None,
    *,
    chat: bool,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
    first_tokens: int | None = None,
) -> tuple[Prompts, str]:
    """The prompts with their tokens, and a note about those left out.

    `chat`: they are written with the tokenizer's chat template, a message of the `system` before them, and `options`
    for the template. `first_tokens`: the rest of a prompt is cut.

    They are empty, or longer than `room` (None = no limit), or the tokenizer knows none of their characters.
    Errors: InputError where no prompt is left.
    """
    if room is not None and room < 1:
        raise InputError(f"rollout.max_new_tokens takes the whole context of the model: lower it by {1 - room} or more")
    options = options or {}
    if chat:
        require_chat_template(tokenizer, "data.chat_template", options)
    full = [prompt for prompt in prompts if prompt.text.strip()]
    empty = len(prompts) - len(full)
    if not chat:
        full = [prompt for prompt in full if len(prompt.messages) <= 1]
    several = len(prompts) - empty - len(full)
    if first_tokens is not None:
        full = _beginnings(full, tokenizer, first_tokens)
    if chat:
        written = [chat_prompt(tokenizer, each.messages or each.text, system, options) for each in full]
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


def _beginnings(prompts: Sequence[PromptRow], tokenizer: Any, count: int) -> list[PromptRow]:
    if any(len(prompt.messages) > 1 for prompt in prompts):
        raise InputError("data.first_tokens cannot cut conversations of several turns")
    rows = encode_all(tokenizer, [prompt.text for prompt in prompts], bos=False)
    cut: list[str] = tokenizer.batch_decode([row[:count] for row in rows], clean_up_tokenization_spaces=False)
    # A part of a character at the cut is left out.
    cut = [
        short if prompt.text.startswith(short) else short.rstrip("\ufffd")
        for short, prompt in zip(cut, prompts, strict=True)
    ]
    return [
        PromptRow(short, prompt.row, turns_of(short) if prompt.messages else ())
        for short, prompt in zip(cut, prompts, strict=True)
    ]
