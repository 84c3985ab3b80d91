"""What a config's section `data` names: rows to train on and held-out rows, without overlap."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from rlhf_kl import ui
from rlhf_kl.config.schema.eval import EvalSection
from rlhf_kl.config.schema.supervised import PairsSection, SFTDataSection
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.files import is_file_name, load_rows, unread_files
from rlhf_kl.data.rows import (
    Example,
    Labelled,
    Pair,
    PromptRow,
    Read,
    read_examples,
    read_labels,
    read_pairs,
    read_prompts,
    read_texts,
)
from rlhf_kl.errors import InputError, blame
from rlhf_kl.seeding import shuffled
from rlhf_kl.ui import log

T = TypeVar("T")
Reader = Callable[[list[dict[str, Any]], str], Read[T]]
HELDOUT_SHARE = 20  # one of this many distinct rows is held out,
SEVERAL_HELDOUT = 4  # and of several at least so many: two or three tell nothing of their error
CHARACTERS = 8_000  # of the texts that a run's evaluations read by default: about 2,000 tokens
FEWEST_TEXTS = 4  # however long


def load(
    key: str,
    ref: str,
    split: str,
    read: Reader[T],
    most: int | None = None,
    given: Sequence[Any] | None = None,
    beside: str | None = None,
) -> list[T]:
    """At most `most` rows of the file or data set under the config key `key` (None = all), as `read` makes them.

    `given`: the rows, where they came from Python. `beside`: what the same key of the split also selects from.
    """
    section, _, name = key.rpartition(".")
    selects = f"{section}.{'eval_' * name.startswith('eval_')}split".lstrip(".")
    names = ["train"] if selects == "data.split" else ["train", "test"]  # a file's: it may have that of the default
    if beside is not None and not is_file_name(beside):
        names.append(re.split(r"[\[(+]", split)[0])  # which is one of the other data set
    with ui.progress(f"reading {key}"), blame(key):
        found, left_out = read(load_rows(ref, split, names, selects) if given is None else list(given), ref)
    if left_out:
        log.info(f"{key}: {left_out}")
    if given is None and Path(ref).is_dir() and (unread := unread_files(ref)):
        log.warning(f"{key}: {ref}: not read: {', '.join(unread)}: keep files of one kind in a folder")
    return drawn(found, most)


def evaluated(texts: list[str], held: EvalSection) -> list[str]:
    """What the evaluations of a run read of the texts: all, or by default so many as have 8,000 characters together.

    They depend on the texts alone, so that runs of one kind read the same.
    """
    if held.max_documents != "auto":
        return texts
    lengths = accumulate(len(texts[i]) for i in shuffled(len(texts), 0, "drawn").tolist())
    return drawn(texts, max(FEWEST_TEXTS, bisect_right(list(lengths), CHARACTERS)))


# ---- what reads the rows of a section


def prompt_reader(data: PromptsSection) -> Reader[PromptRow]:
    """Of prompts."""
    return partial(read_prompts, column=data.column, template=data.template, chat=bool(data.chat_template))


def example_reader(data: SFTDataSection) -> Reader[Example]:
    """Of prompts with responses."""
    return partial(
        read_examples,
        prompt=data.prompt_column,
        response=data.response_column or "",
        template=data.template,
        chat=data.chat_template,
    )


def pair_reader(data: PairsSection) -> Reader[Pair]:
    """Of preference pairs."""
    return partial(
        read_pairs,
        prompt=data.prompt_column,
        chosen=data.chosen_column,
        rejected=data.rejected_column,
        template=data.template,
        chat=data.chat_template,
    )


# ---- training rows and held-out rows


def given_rows(values: Iterable[Any] | None, column: str) -> list[dict[str, Any]] | None:
    """Rows of a list from Python: mappings as they are, a text or a conversation under `column`."""
    return (
        None if values is None else [dict(value) if isinstance(value, Mapping) else {column: value} for value in values]
    )


def prompts(
    data: PromptsSection, held: EvalSection, given: Sequence[Any] | None = None
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Prompts; if no held-out ones are named, one in twenty is held out, and of fewer than twenty all are.

    `given`: the rows to train on, where they came from Python.
    """
    read = prompt_reader(data)
    train, kept = load("data.prompts", data.prompts, data.split, read, given=given), None
    if held.prompts is not None:
        kept = load("eval.prompts", held.prompts, held.split, read, beside=held.texts)
    elif (count := len({row.text for row in train})) < HELDOUT_SHARE:
        log.info(f"data.prompts: {count} are too few to hold some out: evaluations use them too (or eval.prompts)")
        return train, train
    train, kept = divided("data.prompts", train, kept, lambda row: row.text)
    first: dict[str, PromptRow] = {}
    for row in kept:
        first.setdefault(row.text, row)
    return train, list(first.values())


def documents(data: SFTDataSection) -> tuple[list[str], list[str]]:
    """Texts."""
    return _both(data, "texts", partial(read_texts, column=data.column, template=data.template), str)


def examples(data: SFTDataSection) -> tuple[list[Example], list[Example]]:
    """Prompts with responses."""
    return _both(data, "texts", example_reader(data), lambda row: row.prompt)


def pairs(data: PairsSection) -> tuple[list[Pair], list[Pair]]:
    """Preference pairs."""
    return _both(data, "pairs", pair_reader(data), lambda row: row.prompt)


def labelled(data: PairsSection) -> tuple[list[Labelled], list[Labelled]]:
    """Texts with labels."""
    read = partial(read_labels, text=data.text_column, label=data.label_column)
    return _both(data, "labels", read, lambda row: row.text)


def _both(
    data: SFTDataSection | PairsSection,
    name: str,
    read: Reader[T],
    identity: Callable[[T], Hashable],
) -> tuple[list[T], list[T]]:
    held, most = ("eval_texts", data.max_documents) if isinstance(data, SFTDataSection) else ("eval_pairs", None)
    train = load(f"data.{name}", getattr(data, name), data.split, read, most)
    ref = getattr(data, held)
    kept = None if ref is None else load(f"data.{held}", ref, data.eval_split, read)
    return divided(f"data.{name}", train, kept, identity)


def divided(
    key: str, train: Sequence[T], kept: Sequence[T] | None, identity: Callable[[T], Hashable]
) -> tuple[list[T], list[T]]:
    """Training rows and held-out rows: `kept`, or one in twenty of the distinct identities, with all of its rows.

    In place of two or three, four are held out.
    Rows with the same identity (the same text, the same prompt of several pairs) stay together, so nothing leaks.
    Errors: InputError for fewer than twenty distinct ones, and where no row is left to train on.
    """
    if kept is None:
        keys = list(dict.fromkeys(map(identity, train)))
        if len(keys) < HELDOUT_SHARE:
            raise InputError(f"{key}: {len(keys)} different rows are too few to split: name a held-out data set")
        count = len(keys) // HELDOUT_SHARE
        apart = set(drawn(keys, count if count == 1 else max(count, SEVERAL_HELDOUT)))
        return [row for row in train if identity(row) not in apart], [row for row in train if identity(row) in apart]
    apart = {identity(row) for row in kept}
    rest = [row for row in train if identity(row) not in apart]
    if not rest:
        raise InputError(f"{key}: every row is a held-out row too")
    if left_out := len(train) - len(rest):
        log.info(f"{key}: {left_out} of {len(train)} rows left out: they are among the held-out ones")
    return rest, list(kept)


def drawn(rows: Sequence[T], most: int | None) -> list[T]:
    """At most `most` rows in their order (None = all), drawn at random, since a file may be sorted.

    The seed is always the same: two runs, or a run and the next one of its chain, hold out the same rows.
    """
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i] for i in sorted(shuffled(len(rows), 0, "drawn")[:most].tolist())]
