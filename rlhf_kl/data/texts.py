"""Texts, prompts, prompts with responses, preference pairs and labelled texts from rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rlhf_kl.data.chat import is_conversation, several_turns, split_conversation, with_row
from rlhf_kl.data.files import Row, checked_text
from rlhf_kl.errors import InputError
from rlhf_kl.templates import column, fill
from rlhf_kl.types import Prompt

T = TypeVar("T")
UNUSABLE = "several turns without data.chat_template, or roles out of turn"  # of conversations


class Example(NamedTuple):
    """A prompt and the response to learn."""

    prompt: str
    response: str


class Pair(NamedTuple):
    """A prompt with a preferred and another response; the texts are joined without a separator."""

    prompt: str
    chosen: str
    rejected: str


class Labelled(NamedTuple):
    """A text and its label, 0 or 1."""

    text: str
    label: float


def read_texts(rows: Sequence[Row], text_column: str, template: str | None, where: str) -> list[str]:
    """One text per row: a column, or a template filled from several columns.

    Errors: InputError for no rows, a missing column, or an entry that is not text.
    """
    return _read_each(rows, where, lambda row, place: _text(row, text_column, template, place))[0]


def read_prompts(
    rows: Sequence[Row], prompt_column: str, template: str | None, where: str, *, chat: bool
) -> tuple[list[Prompt], int]:
    """One prompt per row, with the row for reward functions, and the number of rows left out.

    Of a conversation it is the part before the last answer. Left out are those of several turns without a chat
    template (`chat`), and those of another shape. Errors: InputError as in `read_texts`.
    """

    def read(row: Row, place: str) -> Prompt | None:
        messages = template is None and is_conversation(column(row, prompt_column, place))
        if messages:
            turn = split_conversation(row[prompt_column])
            text = None if turn is None else _writable(turn[0], chat=chat)
        else:
            text = _text(row, prompt_column, template, place)
        return None if text is None else with_row(text, row, messages=messages)

    return _read_each(rows, where, read)


def read_examples(
    rows: Sequence[Row], prompt: str | None, response: str, template: str | None, where: str, *, chat: bool = False
) -> tuple[list[Example], int]:
    """Prompts with their responses, and the number of rows left out.

    Left out are conversations of several turns without a chat template (`chat`), or without an answer at the end.
    """

    def read(row: Row, place: str) -> Example | None:
        turn = _turn(row, response, place)
        if turn is None:
            return None
        before, answer = turn
        text = _writable(_prompt_of(row, prompt, template, before, place), chat=chat)
        return None if text is None else Example(text, answer)

    return _read_each(rows, where, read)


def read_pairs(
    rows: Sequence[Row],
    prompt: str | None,
    chosen: str,
    rejected: str,
    template: str | None,
    where: str,
    *,
    chat: bool = False,
) -> tuple[list[Pair], int]:
    """Preference pairs, and the number of rows left out.

    Left out are pairs of equal responses or of different prompts, and several turns without a chat template (`chat`).
    Without a prompt column, the common beginning of both responses is the prompt.
    """

    def read(row: Row, place: str) -> Pair | None:
        one, other = _turn(row, chosen, place), _turn(row, rejected, place)
        if one is None or other is None or one == other or one[0] != other[0]:
            return None
        (before, good), (_, bad) = one, other
        if before is None and prompt is None and template is None:
            same = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(good, bad, strict=False))
            before = good[: len(list(same))]
            good, bad = good[len(before) :], bad[len(before) :]
        text = _writable(_prompt_of(row, prompt, template, before, place), chat=chat)
        return None if text is None else Pair(text, good, bad)

    return _read_each(rows, where, read)


def read_labels(rows: Sequence[Row], text: str, label: str, where: str) -> list[Labelled]:
    """Texts with their labels, 0 and 1 or false and true. Errors: InputError for any other label."""

    def read(row: Row, place: str) -> Labelled:
        value = column(row, label, place)
        number = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}.get(str(value).strip())
        if isinstance(value, bool):
            number = float(value)
        if number is None:
            raise InputError(f"{place}: {label} is {value!r:.60}, not 0 or 1")
        return Labelled(_text(row, text, None, place), number)

    return _read_each(rows, where, read)[0]


def _read_each(rows: Sequence[Row], where: str, read: Callable[[Row, str], T | None]) -> tuple[list[T], int]:
    """`read(row, place)` of every row, and the number of None. Errors: InputError if nothing is left."""
    if not rows:
        raise InputError(f"{where}: holds no rows")
    items = [item for i, row in enumerate(rows, 1) if (item := read(row, f"{where}: row {i}")) is not None]
    if not items:
        raise InputError(f"{where}: none of {len(rows)} rows can be used: {UNUSABLE}")
    return items, len(rows) - len(items)


def _text(row: Row, name: str, template: str | None, place: str) -> str:
    if template is not None:
        return checked_text(fill(template, row, place), f"{place}: template")
    return checked_text(column(row, name, place), f"{place}: {name}")


def _turn(row: Row, name: str, place: str) -> tuple[str | None, str] | None:
    """(the prompt, the response) of a column; None for a conversation that does not end with an answer."""
    value = column(row, name, place)
    if not is_conversation(value):
        return None, checked_text(value, f"{place}: {name}")
    turn = split_conversation(value)
    return None if turn is None or turn[1] is None else (turn[0], turn[1])


def _prompt_of(row: Row, name: str | None, template: str | None, before: str | None, place: str) -> str | None:
    """The prompt of a row's response or responses; None for a conversation of another shape.

    before: the prompt in the column of the response.
    """
    if template is None:
        if before is not None:
            return before
        if name is None:
            raise InputError(f"{place}: has no prompt: name its column, or use conversations")
        if is_conversation(column(row, name, place)):
            turn = split_conversation(row[name])
            return None if turn is None or turn[1] is not None else turn[0]  # the answer is in another column
    return _text(row, name or "", template, place)


def _writable(prompt: str | None, *, chat: bool) -> str | None:
    """None for a conversation of several turns without a chat template."""
    return None if several_turns(prompt) and not chat else prompt
