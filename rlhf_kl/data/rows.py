"""Texts, prompts, prompts with responses, preference pairs and labelled texts from rows."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf_kl.data.chat import Unusable, is_conversation, plain_text, split_conversation, turns_of
from rlhf_kl.data.files import checked_text, text_column
from rlhf_kl.errors import InputError
from rlhf_kl.templates import column as value_of
from rlhf_kl.templates import fill, template_fields
from rlhf_kl.types import Conversation, Prompt

T = TypeVar("T")
Read = tuple[list[T], str]  # of the rows that can be used, and which rows were left out, in words
NAMED_ROWS = 3  # of the rows that are left out for one reason


class PromptRow(NamedTuple):
    """The text of a prompt, the row that it came from, and its turns if the row has a conversation."""

    text: str
    row: Mapping[str, Any]
    messages: Conversation = ()


class Example(NamedTuple):
    """A prompt and the response to learn."""

    prompt: Prompt
    response: str


class Pair(NamedTuple):
    """A prompt with a preferred and another response; the texts are joined without a separator."""

    prompt: Prompt
    chosen: str
    rejected: str


class Labelled(NamedTuple):
    """A text and its label, 0 or 1."""

    text: str
    label: float


def read_texts(
    rows: Sequence[dict[str, Any]], where: str, column: str, template: str | None = None, key: str = "data.column:"
) -> Read[str]:
    """One text per row: a column, or a template filled from several columns. Null and empty ones are left out.

    `key`: what names the column. Errors: InputError for no rows, a missing column, or an entry that is not text.
    """
    name = text_column(where, column)
    return _read_each(rows, where, lambda row, place: _full(_text(row, name, template, place, key)))


def read_prompts(
    rows: Sequence[dict[str, Any]], where: str, *, column: str, template: str | None = None, chat: bool = False
) -> Read[PromptRow]:
    """One prompt per row, with the row for reward functions. `chat`: a template may write several turns.

    Of a conversation it is the part before the last answer. Left out are null and empty ones, those of several turns
    without a chat template, and those of another shape. Errors: InputError as in `read_texts`.
    """
    name, key = text_column(where, column), "data.column:"

    def read(row: dict[str, Any], place: str) -> PromptRow:
        if template is None and is_conversation(value_of(row, name, place, key)):
            prompt = _writable(split_conversation(row[name])[0], chat=chat)
            return PromptRow(_full(plain_text(prompt)), row, turns_of(prompt))
        return PromptRow(_full(_text(row, name, template, place, key)), row)

    return _read_each(rows, where, read)


def read_examples(
    rows: Sequence[dict[str, Any]], where: str, *, prompt: str | None, response: str, template: str | None, chat: bool
) -> Read[Example]:
    """Prompts with their responses, from the columns `prompt` and `response`; see `_prompt_of`.

    Left out are conversations of several turns without a chat template, or without an answer at the end.
    """

    def read(row: dict[str, Any], place: str) -> Example:
        before, answer = _turn(row, response, place, "data.response_column:")
        return Example(_prompt_of(row, prompt, template, before, place, chat=chat), answer)

    return _read_each(rows, where, read)


def read_pairs(
    rows: Sequence[dict[str, Any]],
    where: str,
    *,
    prompt: str | None,
    chosen: str,
    rejected: str,
    template: str | None,
    chat: bool,
) -> Read[Pair]:
    """Preference pairs, from the columns `prompt`, `chosen` and `rejected`; see `_prompt_of`.

    Left out are pairs of equal responses or of different prompts, and several turns without a chat template.
    Without a prompt column, the common beginning of both responses is the prompt.
    """

    def read(row: dict[str, Any], place: str) -> Pair:
        before, good = _turn(row, chosen, place, "data.chosen_column:")
        other, bad = _turn(row, rejected, place, "data.rejected_column:")
        if before != other:
            raise Unusable("responses to different prompts")
        if good == bad:
            raise Unusable("equal responses")
        if before is None and prompt is None and template is None:
            same = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(good, bad, strict=False))
            before = good[: len(list(same))]
            good, bad = good[len(before) :], bad[len(before) :]
        return Pair(_prompt_of(row, prompt, template, before, place, chat=chat), good, bad)

    return _read_each(rows, where, read)


def read_labels(rows: Sequence[dict[str, Any]], where: str, *, text: str, label: str) -> Read[Labelled]:
    """Texts with their labels, from the columns `text` and `label`.

    A label is 0 or 1, false or true. Errors: InputError for any other.
    """

    def read(row: dict[str, Any], place: str) -> Labelled:
        value = _known(value_of(row, label, place, "data.label_column:"))
        number = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}.get(str(value).strip())
        if isinstance(value, bool):
            number = float(value)
        if number is None:
            raise InputError(f"{place}: {label} is {value!r:.60}, not 0 or 1")
        return Labelled(_full(_text(row, text, None, place, "data.text_column:")), number)

    return _read_each(rows, where, read)


def _read_each(rows: Sequence[dict[str, Any]], where: str, read: Callable[[dict[str, Any], str], T]) -> Read[T]:
    """`read(row, place)` of every row that is not Unusable. Errors: InputError if nothing is left."""
    if not rows:
        raise InputError(f"{where}: holds no rows")
    items, unusable = list[T](), defaultdict[str, list[int]](list)
    for number, row in enumerate(rows, 1):
        try:
            items.append(read(row, f"{where}: row {number}"))
        except Unusable as reason:
            unusable[str(reason)].append(number)
    reasons = "; ".join(f"{len(numbers)} with {reason} ({_rows(numbers)})" for reason, numbers in unusable.items())
    if not items:
        raise InputError(f"{where}: none of {len(rows)} rows can be used: {reasons}")
    return items, f"{where}: {len(rows) - len(items)} of {len(rows)} rows left out: {reasons}" if reasons else ""


def _rows(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:NAMED_ROWS])) + ", ..." * (len(numbers) > NAMED_ROWS)
    return f"row{'s' * (len(numbers) > 1)} {named}"


def _known(value: Any) -> Any:
    """A value. Errors: Unusable for null."""
    if value is None:
        raise Unusable("null")
    return value


def _full(text: str) -> str:
    """A text. Errors: Unusable where there is nothing in it."""
    if not text.strip():
        raise Unusable("an empty text")
    return text


def _text(row: dict[str, Any], name: str, template: str | None, place: str, key: str) -> str:
    for field in [name] if template is None else template_fields(template):
        _known(value_of(row, field, place, key if template is None else ""))
    return checked_text(row[name] if template is None else fill(template, row, place), f"{place}: {name}")


def _turn(row: dict[str, Any], name: str, place: str, key: str) -> tuple[Prompt | None, str]:
    """(the prompt, the response) of a column. Errors: Unusable for a conversation that does not end with an answer."""
    value = _known(value_of(row, name, place, key))
    if not is_conversation(value):
        return None, checked_text(value, f"{place}: {name}")
    before, answer = split_conversation(value)
    if answer is None:
        raise Unusable("no answer at the end")
    return before, answer


def _prompt_of(
    row: dict[str, Any], name: str | None, template: str | None, before: Prompt | None, place: str, *, chat: bool
) -> Prompt:
    """The prompt of a row's response or responses: from the template, beside the response, or from the column `name`.

    `before`: the prompt in the column of the response. `chat`: a chat template may write several turns.
    """
    key = "data.prompt_column:"
    if template is not None:
        return _text(row, "", template, place, key)
    if before is None:
        if name is None:
            raise InputError(f"{place}: has no prompt: name its column, or use conversations")
        if not is_conversation(value_of(row, name, place, key)):
            return _text(row, name, None, place, key)
        before, answer = split_conversation(row[name])
        if answer is not None:
            raise Unusable("an answer in the column of the prompt")  # the answer is in another column
    return _writable(before, chat=chat)


def _writable(prompt: Prompt | None, *, chat: bool) -> Prompt:
    """A prompt. Errors: Unusable for none, and for several turns without a chat template."""
    if prompt is None:
        raise Unusable("no prompt")
    if not isinstance(prompt, str) and not chat:
        raise Unusable("several turns without data.chat_template")
    return prompt
