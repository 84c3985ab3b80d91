"""Held-out data: a part that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from rlhf_kl.errors import InputError

T = TypeVar("T")
HELDOUT_SHARE = 20  # one of this many distinct rows is held out


def split_heldout(rows: Sequence[T], key: Callable[[T], Hashable], where: str) -> tuple[list[T], list[T]]:
    """Training rows and held-out rows: every twentieth distinct key is held out with all of its rows.

    Rows with the same key (the same text, the same prompt of several pairs) stay together, so nothing leaks.
    Errors: InputError for fewer than twenty distinct keys.
    """
    keys = list(dict.fromkeys(key(row) for row in rows))
    if len(keys) < HELDOUT_SHARE:
        raise InputError(f"{where}: {len(keys)} different rows are too few to split: name a held-out data set")
    apart = set(keys[HELDOUT_SHARE - 1 :: HELDOUT_SHARE])
    return [row for row in rows if key(row) not in apart], [row for row in rows if key(row) in apart]


def without_leaks(rows: Sequence[T], heldout: Sequence[T], key: Callable[[T], Hashable], where: str) -> list[T]:
    """The rows whose key is not in the held-out rows. Errors: InputError if none is left."""
    heldout_keys = {key(row) for row in heldout}
    rest = [row for row in rows if key(row) not in heldout_keys]
    if rows and not rest:
        raise InputError(f"{where}: every row is a held-out row too")
    return rest
