"""Rows of files (.jsonl .json .csv .parquet .txt, and .gz of them), with line numbers in errors, and of data sets."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_kl.data.chat import is_conversation
from rlhf_kl.errors import InputError, collected, no_such_file, suggestion
from rlhf_kl.hub import DATA_SUFFIXES, GZIP, HubName, data_suffix, first_line, hub_name, looks_like_path
from rlhf_kl.plugins import refuse_given
from rlhf_kl.text import utf8, whole

SAVED = ("state.json", "dataset_dict.json")  # of `save_to_disk`: of one data set, and of one with splits


def load_rows(
    ref: str, split: str, names: Sequence[str] = ("train", "test"), key: str = "split"
) -> list[dict[str, Any]]:
    """Rows of a split of a local file, a hub id (`owner/name[:subset][@revision]`), or a folder.

    A folder holds data files, or what `save_to_disk` wrote. `split` is written as for the datasets library,
    "train[:1000]"; `names`: of what has one split only, such as a file; `key`: of the split. Errors: InputError.
    """
    refuse_given(ref)
    if not is_file_name(ref):
        return _read_dataset(ref, split, names, key)
    rows = read_rows(Path(ref))
    if split in names:
        return rows
    try:
        return [rows[i] for _, part in _ranges(dict.fromkeys(names, len(rows)), split) for i in part]
    except ValueError as error:
        raise InputError(f"{ref}: {_wrong_split(error, split, key)}") from error


def is_file_name(ref: str) -> bool:
    """Whether a data reference names a local file (existing or not), not a hub id or folder."""
    return not Path(ref).is_dir() and (Path(ref).is_file() or looks_like_path(ref))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file as mappings; a .txt file has one row per non-empty line, under `text`.

    Errors: InputError with file and line.
    """
    if not path.is_file():
        raise InputError(f"{path}: is no ordinary file") if path.exists() else no_such_file(path)
    suffix = data_suffix(path.name)
    if suffix not in DATA_SUFFIXES:
        raise InputError(f"{path}: unknown file type, use one of {' '.join(DATA_SUFFIXES)}")
    if suffix == ".parquet":
        return _read_parquet(path)
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix]
    return list(reader(_text(_content(path), str(path)), str(path)))


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    if not path.name.lower().endswith(GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read as gzip: {error}") from error


def read_lines(data: bytes, where: str) -> list[dict[str, Any]]:
    """The rows of the content of a .txt file. Errors: InputError."""
    return list(_txt(_text(data, where), where))


def _text(data: bytes, where: str) -> str:
    try:
        return utf8(data)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def text_column(ref: str, column: str) -> str:
    """The column of the text: `text` for a .txt file, else `column`."""
    return "text" if data_suffix(ref) == ".txt" else column


def checked_text(value: Any, where: str) -> str:
    """A value that is text. Errors: InputError."""
    if not isinstance(value, str):
        raise InputError(f"{where} is {'null' if value is None else type(value).__name__}, not text")
    return value


def _jsonl(text: str, where: str) -> Iterator[dict[str, Any]]:
    if text.lstrip().startswith("["):  # a list, which belongs into a .json file
        yield from _json(text, where)
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = _parse(line, f"{where}, line {number}")
            except InputError as error:
                last = number == len(lines)  # without a line break behind it
                cut = last and isinstance(error.__cause__, json.JSONDecodeError)
                raise InputError(f"{error}{'; the file ends here: was it cut?' * cut}") from error
            yield _mapping(row, f"{where}, line {number}")


def _json(text: str, where: str) -> Iterator[dict[str, Any]]:
    if not text.strip():
        return
    try:
        rows = _parse(text, where)
    except InputError:
        if not _is_object(text.lstrip().partition("\n")[0]):
            raise
        yield from _jsonl(text, where)
        return
    inside = [key for key, value in rows.items() if _is_rows(value)] if isinstance(rows, dict) else []
    if inside or not isinstance(rows, (list, dict)):
        hint = f"; keep only the list under {inside[0]!r}" if inside else ""
        raise InputError(f"{where}: holds a {type(rows).__name__}, not a list of rows or one row a line{hint}")
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield _mapping(row, f"{where}, row {number}")


def _is_rows(value: Any) -> bool:
    """Whether a value in an object is a list of rows, so that the object itself is none."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value) and not is_conversation(value)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _csv(text: str, where: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(1 << 30)  # characters in a cell; by default 131,072
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = list(reader.fieldnames or [])
        reader.fieldnames = _told_apart(names)
        if len(names) == 1 and (mark := next((mark for mark in ";\t|" if mark in names[0]), None)):
            raise InputError(f"{where}: line 1: separate columns with commas, not {mark!r}: {names[0]!r:.80}")
        for row in reader:
            if None in row:  # DictReader's key for cells without a column
                cells = len(names) + len(row[None])
                raise InputError(f"{where}: line {reader.line_num}: {cells} cells for {len(names)} columns")
            yield row
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num + 1}: {error}") from error  # where its row begins


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names of columns; one that is there twice becomes "name (1 of 2)" and "name (2 of 2)"."""
    return [
        f"{name} ({names[:i].count(name) + 1} of {many})" if name and (many := names.count(name)) > 1 else name
        for i, name in enumerate(names)
    ]


def _txt(text: str, _where: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        if line.strip():
            yield {"text": line.removesuffix("\r")}


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet  # comes with datasets

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: a text that is no UTF-8
        raise InputError(f"{path}: cannot be read as parquet: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " * ("\n" in text)
        raise InputError(f"{where}: is not JSON: {error.msg} ({line}column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, lists in lists
        raise InputError(f"{where}: is not JSON: {error}") from error


def _mapping(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{where}: is a {type(row).__name__}, not a mapping of columns")
    try:
        whole(json.dumps(row, ensure_ascii=False))  # every text in it, wherever it stands
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    return row


def _read_dataset(ref: str, split: str, names: Sequence[str], key: str) -> list[dict[str, Any]]:
    import datasets

    folder = Path(ref).is_dir()
    name = HubName(ref, None, None) if folder else hub_name(ref)
    if name is None:
        raise InputError(f"{ref} is neither a file nor a hub id (owner/name, owner/name@revision)")
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.utils.disable_progress_bars()
    try:
        if _is_saved(ref):
            return _saved_rows(ref, split, names)
        data = datasets.load_dataset(name.name, name.subset, split=split, revision=name.revision)
        return [dict(row) for row in data]
    except Exception as error:  # the library raises a dozen kinds
        raise InputError(f"{ref}: {_reason(error, ref, split, key)}") from error


def _is_saved(folder: str) -> bool:
    return any((Path(folder) / file).is_file() for file in SAVED)


def _saved_rows(folder: str, split: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a split that `save_to_disk` wrote; a single one may have any of the `names`, beside its own."""
    import datasets

    data = datasets.load_from_disk(folder)
    own = [*names, str(getattr(data, "split", None) or names[0])]
    parts = data if isinstance(data, datasets.DatasetDict) else dict.fromkeys(own, data)
    asked = _ranges({name: len(part) for name, part in parts.items()}, split)
    return [dict(row) for name, part in asked for row in parts[name].select(part)]


def _ranges(sizes: Mapping[str, int], split: str) -> list[tuple[str, range]]:
    """The rows that "train[:1000]" or "train+test" names, of splits of these sizes. Errors: ValueError."""
    import datasets

    asked = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(one.splitname, range(one.from_, one.to)) for one in asked]


def _wrong_split(error: Exception, split: str, key: str) -> str:
    wrong, *names = re.findall(r"['\"]([^'\"]+)['\"]", first_line(error)) or [""]
    if names:  # 'Unknown split "tran". Should be one of ["train", "test"].'
        return f"has no split {wrong!r} ({key}){suggestion(wrong, names)}"
    return f"{key}: {first_line(error)}: {split!r}"


def _data_files(folder: str) -> list[Path]:
    files = (file for file in sorted(Path(folder).rglob("*")) if data_suffix(file.name) in DATA_SUFFIXES)
    return [file for file in files if file.is_file()]


def unread_files(folder: str) -> list[str]:
    """The data files of a folder that belong to none of its splits: the datasets library reads files of one kind."""
    import datasets

    if _is_saved(folder):
        return []
    splits = (datasets.load_dataset_builder(folder).config.data_files or {}).values()
    read = {Path(file).resolve() for files in splits for file in files}
    names = {file: file.relative_to(folder).as_posix() for file in _data_files(folder) if file.resolve() not in read}
    beside = r"(^|/)([._]|dataset_infos?\.json$)"  # hidden ones, and what describes a data set
    return [name for name in names.values() if not re.search(beside, name)]


def _reason(error: Exception, ref: str, split: str, key: str) -> str:
    text = first_line(error)
    if text.startswith(("Unknown split", "Unrecognized instruction")):
        return _wrong_split(error, split, key)
    if not Path(ref).is_dir():
        return f"cannot be read: {text}; {no_such_file(ref)}"
    if _is_saved(ref):
        return f"cannot be read: {text}"
    files = _data_files(ref)
    if not files:
        return f"the folder holds no data files ({' '.join(DATA_SUFFIXES)})"
    problems = list[str]()
    for file in files:
        with collected(problems):
            read_rows(file)
    return f"cannot be read: {problems[0] if problems else text}"
