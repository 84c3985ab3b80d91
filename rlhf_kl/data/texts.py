"""From rows to what is trained on: texts, prompts with responses, preference pairs, labelled texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_kl.data.chat import Conversation, Messages, is_conversation, split_conversation
from rlhf_kl.data.files import Row, checked_text, entry
from rlhf_kl.errors import InputError
from rlhf_kl.templates import fill

UNUSABLE = "several turns without data.chat_template, or roles out of turn"  # of conversations


class Example(NamedTuple):
    """A prompt and the response to learn."""

    prompt: str
    response: str


class Pair(NamedTuple):
    """One comparison of two responses to a prompt, as texts that are joined without a separator."""

    prompt: str
    chosen: str
    rejected: str


class Labelled(NamedTuple):
    """A text and a number that belongs to it."""

    text: str
    label: float


def read_texts(rows: Sequence[Row], column: str, template: str | None, where: str) -> list[str]:
    """One text a row: a column, or a template filled from several.

    Errors: InputError for no rows, a missing column, or an entry that is no text.
    """
    _require_rows(rows, where)
    return [_text(row, column, template, f"{where}: row {number}") for number, row in enumerate(rows, 1)]


def read_prompts(
    rows: Sequence[Row], column: str, template: str | None, where: str, *, chat: bool
) -> tuple[list[str], int]:
    """One prompt a row, of a conversation what stands before its last answer; and how many were left out.

    Left out are conversations of several turns where there is no chat template to write them (`chat`), and those
    of another shape. Errors: InputError as `read_texts`.
    """
    _require_rows(rows, where)
    found, skipped = [], 0
    for number, row in enumerate(rows, 1):
        place = f"{where}: row {number}"
        if template is not None or not is_conversation(entry(row, column, place)):
            found.append(_text(row, column, template, place))
            continue
        asked = _usable(_asked(row[column]), chat=chat)
        if asked is None:
            skipped += 1
        else:
            found.append(asked)
    _require_some(found, skipped, where)
    return found, skipped


def read_examples(
    rows: Sequence[Row],
    prompt: str | None,
    response: str,
    template: str | None,
    where: str,
    *,
    chat: bool = False,
) -> tuple[list[Example], int]:
    """Prompts with their responses, and how many were left out.

    Left out are conversations of several turns where there is no chat template to write them (`chat`), and those
    that do not end with an answer.
    """
    _require_rows(rows, where)
    found, skipped = [], 0
    for number, row in enumerate(rows, 1):
        place = f"{where}: row {number}"
        turn = _turn(row, response, place)
        if turn is None:
            skipped += 1
            continue
        asked, answer = turn
        full = _usable(_prompt_of(row, prompt, template, asked, place), chat=chat)
        if full is None:
            skipped += 1
        else:
            found.append(Example(full, answer))
    _require_some(found, skipped, where)
    return found, skipped


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
    """Preference pairs, and how many were left out.

    Left out are the same response twice, responses to different prompts, and conversations of several turns where
    there is no chat template to write them (`chat`).
    Without a prompt column what both responses begin with is the prompt.
    """
    _require_rows(rows, where)
    found, skipped = [], 0
    for number, row in enumerate(rows, 1):
        place = f"{where}: row {number}"
        turns = [_turn(row, column, place) for column in (chosen, rejected)]
        if turns[0] is None or turns[1] is None or turns[0] == turns[1] or turns[0][0] != turns[1][0]:
            skipped += 1
            continue
        (asked, good), (_, bad) = turns[0], turns[1]
        if asked is None and prompt is None and template is None:
            asked = common_beginning(good, bad)
            good, bad = good[len(asked) :], bad[len(asked) :]
        full = _usable(_prompt_of(row, prompt, template, asked, place), chat=chat)
        if full is None:
            skipped += 1
        else:
            found.append(Pair(full, good, bad))
    _require_some(found, skipped, where)
    return found, skipped


def read_labels(rows: Sequence[Row], text: str, label: str, where: str) -> list[Labelled]:
    """Texts with their numbers; true and false count as 1 and 0. Errors: InputError for a label that is no number."""
    _require_rows(rows, where)
    found = []
    for number, row in enumerate(rows, 1):
        place = f"{where}: row {number}"
        value = entry(row, label, place)
        try:
            figure = float(value) if isinstance(value, (bool, int, float, str)) else math.nan
        except ValueError:
            figure = math.nan
        if not math.isfinite(figure):
            raise InputError(f"{place}: {label} is {value!r:.60}, not a number")
        found.append(Labelled(_text(row, text, None, place), figure))
    return found


def _text(row: Row, column: str, template: str | None, place: str) -> str:
    if template is not None:
        return checked_text(fill(template, row, place), f"{place}: template")
    return checked_text(entry(row, column, place), f"{place}: {column}")


def _turn(row: Row, column: str, place: str) -> tuple[str | None, str] | None:
    """(what was said before, the response); None for a conversation that does not end with an answer."""
    value = entry(row, column, place)
    if not is_conversation(value):
        return None, checked_text(value, f"{place}: {column}")
    turn = split_conversation(value)
    return None if turn is None or turn[1] is None else (turn[0], turn[1])


def _prompt_of(row: Row, column: str | None, template: str | None, asked: str | None, place: str) -> str | None:
    """The prompt of a row's response or responses; None for a conversation of another shape."""
    if template is None and asked is not None:
        return asked
    if template is None and column is None:
        raise InputError(f"{place}: has no prompt: name its column, or bring conversations")
    if template is None and column is not None and is_conversation(entry(row, column, place)):
        turn = split_conversation(row[column])
        return None if turn is None or turn[1] is not None else turn[0]  # the answer stands in a column of its own
    return _text(row, column or "", template, place)


def _asked(messages: Messages) -> str | None:
    turn = split_conversation(messages)
    return None if turn is None else turn[0]


def _usable(prompt: str | None, *, chat: bool) -> str | None:
    return None if isinstance(prompt, Conversation) and not chat else prompt


def common_beginning(one: str, other: str) -> str:
    """What both texts begin with."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return one[:i]
    return min(one, other, key=len)


def _require_rows(rows: Sequence[Row], where: str) -> None:
    if not rows:
        raise InputError(f"{where}: holds no rows")


def _require_some(found: Sequence[Any], skipped: int, where: str) -> None:
    if not found:
        raise InputError(f"{where}: none of {skipped} rows can be used: {UNUSABLE}")
