from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from rlhf_kl.data.files import read_rows
from rlhf_kl.data.texts import read_texts
from tests import made

ROWS = [{"prompt": "one", "text": 'a, "b"\nc'}, {"prompt": "zwölf 🙂", "text": "x\u2028y"}]
FILES = {  # a byte order mark is no part of the text, and a line ends with a newline only
    "rows.jsonl": "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS),
    "rows.json": json.dumps(ROWS),
    "rows.csv": '\ufeffprompt,text\none,"a, ""b""\nc"\nzwölf 🙂,x\u2028y\n',
}


@pytest.mark.parametrize("name", [*FILES, "rows.parquet"])
def test_each_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    if name in FILES:
        (tmp_path / name).write_bytes(FILES[name].encode())
    else:
        Dataset.from_list(ROWS).to_parquet(str(tmp_path / name))
    assert read_rows(tmp_path / name) == ROWS


def read_column(path: Path, column: str = "prompt") -> list[str]:
    return read_texts(read_rows(path), str(path), column)[0]


def test_a_text_file_has_a_row_per_line_whatever_the_column_is_called(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_column(path) == ["one", "  two "]


def problem(path: Path, column: str = "prompt") -> str:
    words = made.problem(read_column, path, column)
    assert str(path) in words
    return words


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("x.jsonl", "", "holds no rows"),
        ("x.csv", "prompt\n", "holds no rows"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: is not JSON"),
        ("x.jsonl", '{"prompt": "a"}\n["b"]\n', "line 2: is a list"),
        ("x.json", '{"prompt": "a"}', "holds a dict, not a list"),
        ("x.json", '[{"prompt": "a"}, 3]', "row 2: is a int"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "row 2: prompt is int, not text"),
        ("x.csv", 'prompt\n"a\n', "x.csv: "),
        ("x.csv", "prompt,text\na,b\nwell, then,c\n", "line 3: 3 cells for 2 columns"),  # a comma without quotes
        ("x.jsonl", '{"promt": "a"}\n', "row 1 has no column 'prompt'; did you mean promt?"),
        ("x.jsonl", '{"prompt": "a"}\n{"x": 1, "y": 2}\n', "row 2 has no column 'prompt' (it has x, y)"),
        ("x.parquet", "no parquet at all", "cannot be read as parquet"),
        ("x.pickle", "", "unknown file type"),
    ],
)
def test_each_problem_is_one_line_that_says_where(name: str, body: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(body, encoding="utf-8")
    assert expected in problem(path)


def test_a_pair_of_surrogates_is_a_character_and_a_short_row_has_a_null(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a smile \\ud83d\\ude42"}\n')
    assert read_column(tmp_path / "x.jsonl") == ["a smile \U0001f642"]
    (tmp_path / "x.csv").write_text("prompt,text\na,b\nc\n")
    assert read_column(tmp_path / "x.csv", "text") == ["b"]


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    assert "no such file" in problem(tmp_path / "nowhere.jsonl")
    assert "no such file" in problem(tmp_path)
    (tmp_path / "latin.txt").write_bytes("gr\u00fcn".encode("latin-1"))
    assert "is not UTF-8 text (byte 2)" in problem(tmp_path / "latin.txt")
