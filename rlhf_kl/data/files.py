"""Rows of files (.jsonl .json .csv .parquet .txt), with line numbers in errors, and of data sets."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_kl.config.paths import DATA_SUFFIXES, looks_like_path
from rlhf_kl.errors import InputError, no_such_file, suggestion
from rlhf_kl.hub import HubName, first_line, hub_name

Row = dict[str, Any]


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
        for row in reader:
            if None in row:  # DictReader's key for cells without a column
                columns = len(row) - 1
                cells = columns + len(row[None])
                raise InputError(f"{where}: line {reader.line_num}: {cells} cells for {columns} columns")
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
    return row


def _read_dataset(ref: str, split: str) -> list[Row]:
    import datasets

    folder = Path(ref).is_dir()
    name = HubName(ref, None, None) if folder else hub_name(ref)
    if name is None:
        raise InputError(f"{ref} is neither a file nor a hub id (owner/name, owner/name@revision)")
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.utils.disable_progress_bars()
    try:
        data = datasets.load_dataset(name.name, name.subset, split=split, revision=name.revision)
    except Exception as error:  # the library raises a dozen kinds
        raise InputError(f"{ref}: {_reason(error, ref, split)}") from error
    return [dict(row) for row in data]


def _reason(error: Exception, ref: str, split: str) -> str:
    text = first_line(error)
    if text.startswith("Unknown split"):  # 'Unknown split "tran". Should be one of ["train", "test"].'
        names = re.findall(r"['\"]([^'\"]+)['\"]", text.partition("one of")[2])
        return f"has no split {split!r}{suggestion(split, names)}"
    return f"cannot be read: {text}; {no_such_file(ref)}"
