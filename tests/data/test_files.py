from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from rlhf_kl.data.files import load_rows, read_rows, unread_files
from rlhf_kl.data.rows import read_texts
from tests import made

ROWS = [{"prompt": "one", "text": 'a, "b"\nc'}, {"prompt": "zwölf 🙂", "text": "x\u2028y"}]
FILES = {  # a byte order mark is no part of the text, and a line ends with a newline only
    "rows.jsonl": "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS),
    "rows.json": json.dumps(ROWS),
    "lines.json": "\ufeff" + "".join(json.dumps(row) + "\r\n" for row in ROWS),  # either kind under either name
    "list.jsonl": json.dumps(ROWS, indent=1),
    "rows.csv": '\ufeffprompt,text\none,"a, ""b""\nc"\nzwölf 🙂,x\u2028y\n',
}


@pytest.mark.parametrize("name", [*FILES, "rows.parquet"])
def test_each_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    if name in FILES:
        (tmp_path / name).write_bytes(FILES[name].encode())
    else:
        Dataset.from_list(ROWS).to_parquet(str(tmp_path / name))
    assert read_rows(tmp_path / name) == ROWS


@pytest.mark.parametrize("name", FILES)
def test_a_compressed_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.GZ"
    path.write_bytes(gzip.compress(FILES[name].encode()))
    assert read_rows(path) == load_rows(str(path), "train") == ROWS


def test_a_compressed_file_that_is_cut_or_none_is_told(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b"%d\n" % (n * n) for n in range(500)))
    for number, data in enumerate((whole[:-100], b"no gzip", whole[:40] + b"?" * 20 + whole[60:])):
        path = tmp_path / f"{number}.txt.gz"
        path.write_bytes(data)
        assert "gzip" in problem(path)
    (tmp_path / "x.parquet.gz").write_bytes(whole)  # parquet is compressed inside
    assert "unknown file type" in problem(tmp_path / "x.parquet.gz")
    assert "no such file" in problem(tmp_path / "nowhere.csv.gz")


def read_column(path: Path, column: str = "prompt") -> list[str]:
    return read_texts(read_rows(path), str(path), column)[0]


def test_a_text_file_has_a_row_per_line_whatever_the_column_is_called(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_column(path) == ["one", "  two "]
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_column(tmp_path / "rows.txt.gz") == ["one", "  two "]


def problem(path: Path, column: str = "prompt") -> str:
    words = made.problem(read_column, path, column)
    assert str(path) in words
    return words


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("x.jsonl", "", "holds no rows"),
        ("x.csv", "prompt\n", "holds no rows"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: .*JSON"),
        ("x.jsonl", '{"prompt": "a"}\n["b"]\n', "line 2: is a list"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": "b', r"line 2: .*JSON.*column 12.*file ends"),  # it was cut
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": "b"}}\n', r"line 2: .*JSON.*column 16\)$"),
        ("x.jsonl", '{"prompt": ' + "[" * 99999, "line 1: .*JSON"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": "a smile \\ud83d"}\n', "line 2: .*surrogate pair"),
        ("x.jsonl", '{"prompt": [{"content": {"\\ud83d": 1}}]}', "line 1: .*surrogate pair"),
        ("x.json", '[{"prompt": "a"}, {"prompt": "\\udc00 a"}]', "row 2: .*surrogate pair"),
        ("x.json", "", "holds no rows"),
        ("x.json", '"a"', "holds a str"),
        ("x.json", '{"version": 1, "data": []}', "holds a dict"),
        ("x.json", '{"prompt": "a"}\n{"prompt": \n', "line 2: .*JSON"),
        ("x.json", '[{"prompt": "a"},\n{"prompt": ]', r"JSON.*line 2, column 12\)"),
        ("x.json", '[{"prompt": "a"}, 3]', "row 2: is"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "row 2: prompt "),
        ("x.csv", 'prompt\n"a\n', "line 2: "),
        ("x.csv", "prompt;text\na;b\n", "line 1: .*commas, not ';'"),
        ("x.csv", "prompt\ttext\na\tb\n", r"line 1: .*commas, not '\\t'"),
        ("x.csv", "prompt,text,prompt\na,b,c\n", r"row 1 .*1 of 2.*text.*2 of 2.*data\.column"),
        ("x.csv", "prompt,text\na,b\nwell, then,c\n", "line 3: 3 cells"),  # a comma without quotes
        ("x.jsonl", '{"promt": "a"}\n', r"row 1 .*'prompt'.* promt\?"),
        ("x.jsonl", '{"prompt": "a"}\n{"x": 1, "y": 2}\n', r"row 2 .*'prompt'.*x, y.*data\."),
        ("x.jsonl", '{"text": "a"}\n', r"row 1 .*'prompt'.*data\.column: text"),
        ("x.parquet", "no parquet at all", "as parquet"),
        ("x.pickle", "", "unknown file type"),
    ],
)
def test_each_problem_is_one_line_that_says_where(name: str, body: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(body, encoding="utf-8")
    assert re.search(expected, problem(path))


@pytest.mark.parametrize("ends", ["", "\n"])
@pytest.mark.parametrize(
    "row", [{"prompt": "a"}, {"prompt": "a", "tags": ["b"]}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_an_object_alone_is_one_row_under_either_name(row: dict[str, object], ends: str, tmp_path: Path) -> None:
    for name, indent in (("x.jsonl", None), ("x.json", None), ("x.json", 1)):
        (tmp_path / name).write_text(json.dumps(row, indent=indent) + ends)
        assert read_rows(tmp_path / name) == [row]


def test_a_column_that_is_there_twice_is_no_trouble_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label,label\na,0,1\n")
    assert read_column(tmp_path / "x.csv", "text") == ["a"]
    assert read_column(tmp_path / "x.csv", "label (2 of 2)") == ["1"]


def test_a_pair_of_surrogates_is_a_character_and_a_short_row_has_a_null(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a smile \\ud83d\\ude42"}\n')
    assert read_column(tmp_path / "x.jsonl") == ["a smile \U0001f642"]
    (tmp_path / "x.csv").write_text("prompt,text\na,b\nc\n")
    assert read_column(tmp_path / "x.csv", "text") == ["b"]


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    assert "no such file" in problem(tmp_path / "nowhere.jsonl")
    assert "ordinary file" in problem(tmp_path)
    (tmp_path / "latin.txt").write_bytes("a\ngr\u00fcn".encode("latin-1"))
    assert "UTF-8 text (line 2, byte 4)" in problem(tmp_path / "latin.txt")
    (tmp_path / "wide.csv").write_bytes("prompt\na\n".encode("utf-16"))
    assert "but UTF-16" in problem(tmp_path / "wide.csv")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "no data files"),
        ({"a.jsonl": '{"prompt": "a"}\n', "b.jsonl": '{"prompt": "a"}\n{"prompt": \n'}, "b.jsonl, line 2: "),
        ({"a.jsonl": '{"prompt": "a"}\n{"prompt": "\\ud83d"}\n'}, "a.jsonl, line 2: half"),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_by_its_file(
    files: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    words = made.problem(load_rows, str(folder), "train")
    assert expected in words
    assert "no such file" not in words


def test_a_data_set_that_was_saved_to_disk(tmp_path: Path) -> None:
    data = Dataset.from_list([{"n": n} for n in range(10)])
    one, several = str(tmp_path / "one"), str(tmp_path / "several")
    data.save_to_disk(one)
    DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(several)
    read = {
        (one, "train"): range(10),  # it has one split, as a file has
        (one, "test"): range(10),
        (one, "train[8:]"): range(8, 10),
        (several, "test"): range(3),
        (several, "train[:20%]"): range(2),
        (several, "train[9:]+test[:1]"): [9, 0],
    }
    for (folder, split), numbers in read.items():
        assert [row["n"] for row in load_rows(folder, split)] == list(numbers)
    assert "mean train?" in made.problem(load_rows, several, "tran")
    assert made.problem(load_rows, one, "tset").endswith("mean test?")
    Dataset.from_list([{"n": n} for n in range(5)], split="dev").save_to_disk(str(tmp_path / "dev"))
    assert len(load_rows(str(tmp_path / "dev"), "dev[:4]")) == 4  # its own name
    next(Path(one).glob("*.arrow")).unlink()
    assert "cannot be read: " in made.problem(load_rows, one, "train")


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("train", range(10)),
        ("test", range(10)),
        ("train[8:]", range(8, 10)),
        ("train[:20%]", range(2)),
        ("test[9:]+train[:1]", [9, 0]),
        ("tset", r"no split 'tset' \(data\.split\); .*test"),
        ("tran[:5]", r"no split 'tran' \(data\.split\); .*train"),
        ("train[", r"data\.split: .*'train\['"),
    ],
)
def test_a_file_gives_the_part_that_a_saved_data_set_gives(
    split: str, numbers: Sequence[int] | str, tmp_path: Path
) -> None:
    rows = [{"n": n} for n in range(10)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for ref in map(str, (tmp_path / "x.jsonl", tmp_path / "saved")):
        if isinstance(numbers, str):
            words = made.problem(load_rows, ref, split, key="data.split")
            assert words.startswith(ref)
            assert re.search(numbers, words)
        else:
            assert [row["n"] for row in load_rows(ref, split)] == list(numbers)


def test_the_files_of_a_folder_that_no_split_holds_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", ".c.csv"):
        (folder / name).write_text('{"n": 1}\n')
    (folder / "dataset_infos.json").write_text("{}")
    assert len(load_rows(str(folder), "train")) == 2
    assert unread_files(str(folder)) == []
    (folder / "d.csv").write_text("n\n1\n")
    assert unread_files(str(folder)) == ["d.csv"]
    (folder / "train.jsonl").write_text('{"n": 1}\n')  # a file with the name of a split leaves the others out
    assert unread_files(str(folder)) == ["a.jsonl", "b.jsonl", "d.csv"]


@pytest.mark.parametrize("ref", ["https://x.org/a.jsonl", "s3://bucket/rows", "hf://datasets/a/b", "file:///tmp/a.csv"])
def test_an_address_is_no_file(ref: str) -> None:
    assert "is an address" in made.problem(load_rows, ref, "train")
