"""Rows of files (.jsonl .json .csv .parquet .txt), with line numbers in errors, and of data sets; held-out rows."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_kl.config.paths import DATA_SUFFIXES, looks_like_path
from rlhf_kl.errors import InputError, no_such_file, suggestion
from rlhf_kl.hub import HubName, first_line, hub_name, reachable

T = TypeVar("T")
Row = dict[str, Any]
HELDOUT_SHARE = 20  # one of this many distinct rows is held out


def load_rows(ref: str, split: str) -> list[Row]:
    """Rows of a local file; or of a split of a hub id (`owner/name[:subset][@revision]`) or a folder with data files.

    `split` is written as for the datasets library, "train[:1000]", and not read for a file. Errors: InputError.
    """
    return read_rows(Path(ref)) if is_file_name(ref) else _read_dataset(ref, split)


def is_file_name(ref: str) -> bool:
    """Whether a data reference names a local file (existing or not), not a hub id or folder."""
    return not Path(ref).is_dir() and (Path(ref).is_file() or looks_like_path(ref))


def read_rows(path: Path) -> list[Row]:
    """All rows of a file as mappings; a .txt file has one row per non-empty line, under `text`.

    Errors: InputError with file and line.
    """
    if not path.is_file():
        raise no_such_file(path)
    suffix = path.suffix.lower()
    if suffix not in DATA_SUFFIXES:
        raise InputError(f"{path}: unknown file type, use one of {' '.join(DATA_SUFFIXES)}")
    if suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a spreadsheet puts a byte order mark in front
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix]
    return list(reader(text, str(path)))


def text_column(ref: str, column: str) -> str:
    """The column of the text: `text` for a .txt file, else `column`."""
    return "text" if ref.lower().endswith(".txt") else column


def checked_text(value: Any, where: str) -> str:
    """A value that is text. Errors: InputError."""
    if not isinstance(value, str):
        raise InputError(f"{where} is {'null' if value is None else type(value).__name__}, not text")
    return value


_SURROGATE = re.compile("[\ud800-\udfff]")


def broken_text(value: Any) -> str | None:
    """The first text in a value, or in what it holds, with half of a surrogate pair, which no UTF-8 can hold."""
    if isinstance(value, str):
        return value if _SURROGATE.search(value) else None
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((found for part in parts if (found := broken_text(part)) is not None), None)


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
    csv.field_size_limit(1 << 30)  # characters in a cell; by default 131,072
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


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # comes with datasets

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as parquet: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON: {error}") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{where}: is a {type(row).__name__}, not a mapping of columns")
    if (broken := broken_text(row)) is not None:
        raise InputError(f"{where}: half of a surrogate pair is no text: {broken[-60:]!r}")
    return row


def _read_dataset(ref: str, split: str) -> list[Row]:
    import datasets

    folder = Path(ref).is_dir()
    name = HubName(ref, None, None) if folder else hub_name(ref)
    if name is None:
        raise InputError(f"{ref} is neither a file nor a hub id (owner/name, owner/name@revision)")
    online = folder or reachable(name, ref)
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.utils.disable_progress_bars()
    datasets.config.HF_HUB_OFFLINE |= not online  # from its cache, without retries
    try:
        data = datasets.load_dataset(name.name, name.subset, split=split, revision=name.revision)
    except Exception as error:  # the library raises a dozen kinds
        raise InputError(f"{ref}: {_reason(error, ref, split, online)}") from error
    return [dict(row) for row in data]


def _reason(error: Exception, ref: str, split: str, online: bool) -> str:
    text = first_line(error)
    if text.startswith("Unknown split"):  # 'Unknown split "tran". Should be one of ["train", "test"].'
        names = re.findall(r"['\"]([^'\"]+)['\"]", text.partition("one of")[2])
        return f"has no split {split!r}{suggestion(split, names)}"
    if not online:
        return f"the hub cannot be reached, its cache does not contain it, and {no_such_file(ref)}"
    return f"cannot be read: {text}"


def drawn(rows: Sequence[T], most: int | None) -> list[T]:
    """At most `most` rows in their order (None = all), drawn at random, since a file may be sorted.

    The seed is always the same: two runs, or a run and the next one of its chain, hold out the same rows.
    """
    from rlhf_kl.seeding import shuffled  # imports torch

    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i] for i in sorted(shuffled(len(rows), 0, "drawn")[:most].tolist())]


def split_heldout(rows: Sequence[T], key: Callable[[T], Hashable]) -> tuple[list[T], list[T]]:
    """Training rows and held-out rows: one in twenty of the distinct keys is held out with all of its rows.

    Rows with the same key (the same text, the same prompt of several pairs) stay together, so nothing leaks.
    Errors: InputError for fewer than twenty distinct keys.
    """
    keys = list(dict.fromkeys(key(row) for row in rows))
    if len(keys) < HELDOUT_SHARE:
        raise InputError(f"{len(keys)} different rows are too few to split: name a held-out data set")
    apart = set(drawn(keys, len(keys) // HELDOUT_SHARE))
    return [row for row in rows if key(row) not in apart], [row for row in rows if key(row) in apart]


def without_leaks(rows: Sequence[T], heldout: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """The rows whose key is not in the held-out rows. Errors: InputError if none is left."""
    heldout_keys = {key(row) for row in heldout}
    rest = [row for row in rows if key(row) not in heldout_keys]
    if rows and not rest:
        raise InputError("every row is a held-out row too")
    return rest
