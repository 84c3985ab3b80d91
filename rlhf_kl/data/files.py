"""Rows from .jsonl .json .csv .parquet .txt files, each problem named with its file and line; and held-out rows.

Not read with the datasets library, which raises StopIteration for an empty file, accepts mixed types
and gives no line numbers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_kl.errors import InputError

T = TypeVar("T")
Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
HELDOUT_SHARE = 20  # one of this many distinct rows is held out
MAX_CHARACTERS = 10_000_000  # in one text; a longer one is a broken file


def load_rows(ref: str, split: str, key: str) -> list[Row]:
    """Rows of a local file, or of a split of a hub id or a folder with data files.

    `split` is not read for a file. Errors: InputError.
    """
    if is_file_name(ref):
        return read_rows(Path(ref), key)
    from rlhf_kl.data.hub import read_dataset

    return read_dataset(ref, split, key)


def is_file_name(ref: str) -> bool:
    """Whether a data reference names a local file (existing or not), not a hub id or folder."""
    path = Path(ref)
    return not path.is_dir() and (path.is_file() or ref.startswith((".", "/", "~")) or path.suffix.lower() in SUFFIXES)


def read_rows(path: Path, key: str) -> list[Row]:
    """All rows of a file as mappings; a .txt file has one row per non-empty line, under `text`.

    `key` is the config key, for messages. Errors: InputError with file and line.
    """
    if not path.is_file():
        raise InputError(f"{key}: no such file: {path}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{key}: {path}: unknown file type, use one of {' '.join(SUFFIXES)}")
    if suffix == ".parquet":
        return _read_parquet(path, key)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a spreadsheet puts a byte order mark in front
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{key}: {path}: cannot be read: {error.strerror}") from error
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix]
    return list(reader(text, f"{key}: {path}"))


def text_column(ref: str, column: str) -> str:
    """The column of the text: `text` for a .txt file, else `column`."""
    return "text" if ref.lower().endswith(".txt") else column


def checked_text(value: Any, where: str) -> str:
    """A value that is usable text. Errors: InputError for another type, an invalid character, or too much text."""
    if not isinstance(value, str):
        raise InputError(f"{where} is {'null' if value is None else type(value).__name__}, not text")
    if len(value) > MAX_CHARACTERS:
        raise InputError(f"{where} has {len(value):,} characters, more than {MAX_CHARACTERS:,}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half of a surrogate pair (character {error.start})") from error
    return value


def _jsonl(text: str, where: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _mapping(_parse(line, f"{where}, line {number}"), f"{where}, line {number}")


def _json(text: str, where: str) -> Iterator[Row]:
    rows = _parse(text, where)
    if not isinstance(rows, list):
        raise InputError(f"{where}: holds a {type(rows).__name__}, not a list of rows")
    for number, row in enumerate(rows, 1):
        yield _mapping(row, f"{where}, row {number}")


def _csv(text: str, where: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_CHARACTERS)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = list(reader.fieldnames or [])
        if twice := [name for name in dict.fromkeys(names) if name and names.count(name) > 1]:
            raise InputError(f"{where}: its header names {twice[0]!r} more than once")
        for row in reader:
            if None in row:  # DictReader's key for cells without a column
                cells = len(names) + len(row[None])
                raise InputError(f"{where}: line {reader.line_num}: {cells} cells for {len(names)} columns")
            yield row
    except csv.Error as error:
        raise InputError(f"{where}: {error}") from error


def _txt(text: str, _where: str) -> Iterator[Row]:
    for line in text.split("\n"):
        if line.strip():
            yield {"text": line.removesuffix("\r")}


def _read_parquet(path: Path, key: str) -> list[Row]:
    import datasets

    from rlhf_kl.data.hub import silent

    try:
        with silent(datasets):
            return list(datasets.Dataset.from_parquet(str(path), keep_in_memory=True))
    except Exception as error:  # pyarrow and datasets raise a dozen kinds
        raise InputError(f"{key}: {path}: cannot be read as parquet: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{where}: cannot be read: {error}") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{where}: is a {type(row).__name__}, not a mapping of columns")
    return row


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
