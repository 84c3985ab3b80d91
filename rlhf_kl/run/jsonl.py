"""JSON lines that survive a crash: `metrics.jsonl` and `samples.jsonl`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_kl.errors import InputError
from rlhf_kl.run.files import write_bytes_atomic


def json_ready(value: Any) -> Any:
    """`value` as strict JSON can hold it: NaN and infinities become None, numpy and torch scalars numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars included, without importing either
        return json_ready(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def encode_json(value: Any, *, indent: int | None = None) -> bytes:
    """Strict UTF-8 JSON; a lone surrogate is written as its escape, which any reader accepts."""
    text = json.dumps(json_ready(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")


class JsonlWriter:
    """Appends one JSON object per line; each line reaches the operating system before `write` returns."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending, after repairing a last line that a crash left incomplete."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_tail(path)
        self._file = path.open("ab", buffering=0)  # a failed write must not be repeated at the end

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row. Errors: OSError (disk full); then no part of the row stays."""
        line = memoryview(encode_json(row) + b"\n")
        before = self.size
        try:
            while line:  # mostly one write, so a crash damages at most the last line
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def size(self) -> int:
        """Bytes of the file so far, all of them whole rows."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Puts all rows on the disk: call it before a checkpoint that relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of `path`, without an incomplete last line; empty without a file.

    Raises `InputError` for a damaged line before the last.
    """
    return [row for _, row in _read_lines(path)]


def truncate_after(path: Path, step: int) -> None:
    """Drops the rows with a `step` above the given one and an incomplete last line, atomically.

    For resuming: rows written after the checkpoint are computed again. No `JsonlWriter` may be open on it.
    """
    if not path.exists():
        return
    kept = b"".join(
        line + b"\n" for line, row in _read_lines(path) if not isinstance(s := row.get("step"), int) or s <= step
    )
    if kept != path.read_bytes():
        write_bytes_atomic(path, kept)


def truncate_at(path: Path, length: int) -> bool:
    """Cuts the file to its first `length` bytes; returns False, without a cut, if they do not end with a row."""
    if not path.exists():
        return length == 0
    with path.open("r+b") as file:
        if length > 0:
            file.seek(length - 1)
            if file.read(1) != b"\n":
                return False
        file.truncate(length)
        os.fsync(file.fileno())
    return True


def _read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        if (row := _parse(line)) is not None:
            rows.append((line, row))
        elif number < len(lines) and line.strip():
            raise InputError(f"{path}: line {number} is not a JSON object")
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # includes undecodable bytes
        return None
    return row if isinstance(row, dict) else None


def _mend_tail(path: Path) -> None:
    """Repair an incomplete last line. Else a new row would be appended to it, and both lost."""
    if not path.exists():
        return
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return
    start = data.rfind(b"\n") + 1
    whole = _parse(data[start:]) is not None
    write_bytes_atomic(path, data + b"\n" if whole else data[:start])
