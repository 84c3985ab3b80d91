"""Rows from .jsonl .json .csv .parquet .txt files, each problem named with its file and line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_kl.components import nearest
from rlhf_kl.errors import InputError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def read_rows(path: Path, what: str) -> list[Row]:
    """All rows of a file as mappings; a .txt file has one row per non-empty line, under `text`.

    `what` names the config key in messages. Errors: InputError with file and line.
    """
    if not path.is_file():
        raise InputError(f"{what}: no such file: {path}")
    if path.suffix not in SUFFIXES:
        raise InputError(f"{what}: {path}: unknown kind of file, one of {' '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        return _read_parquet(path, what)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a spreadsheet puts a byte order mark in front
    except UnicodeDecodeError as error:
        raise InputError(f"{what}: {path}: is not UTF-8 text (byte {error.start})") from error
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[path.suffix]
    return list(reader(text, f"{what}: {path}"))


def read_column(path: Path, column: str, what: str) -> list[str]:
    """One text column of a file. Errors: InputError for no rows, a missing column, or an entry that is no text."""
    name = "text" if path.suffix == ".txt" else column
    return columns(read_rows(path, what), [name], f"{what}: {path}")[0]


def columns(rows: list[Row], names: list[str], where: str) -> list[list[str]]:
    """Text columns of rows, in the order of `names`."""
    if not rows:
        raise InputError(f"{where}: holds no rows")
    found: list[list[str]] = [[] for _ in names]
    for number, row in enumerate(rows, 1):
        for values, name in zip(found, names, strict=True):
            if name not in row:
                guess = nearest(name, [str(key) for key in row])
                hint = f"; did you mean {guess}?" if guess else f" (it has {', '.join(map(str, row)) or 'none'})"
                raise InputError(f"{where}: row {number} has no column {name!r}{hint}")
            if not isinstance(row[name], str):
                kind = "null" if row[name] is None else type(row[name]).__name__
                raise InputError(f"{where}: row {number}: {name} is {kind}, not text")
            values.append(row[name])
    return found


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
    try:
        yield from csv.DictReader(io.StringIO(text, newline=""), strict=True)
    except csv.Error as error:
        raise InputError(f"{where}: {error}") from error


def _txt(text: str, _where: str) -> Iterator[Row]:
    for line in text.split("\n"):
        if line.strip():
            yield {"text": line.removesuffix("\r")}


def _read_parquet(path: Path, what: str) -> list[Row]:
    from datasets import Dataset

    try:
        return list(Dataset.from_parquet(str(path), keep_in_memory=True))
    except Exception as error:  # pyarrow and datasets raise a dozen kinds
        raise InputError(f"{what}: {path}: cannot be read as parquet: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not JSON: {error.msg} (column {error.colno})") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{where}: is a {type(row).__name__}, not a mapping of columns")
    return row
