"""What people bring that cannot be used: one line that says why, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Cli = Callable[..., Any]
Write = Callable[[Path], None]
PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n"


@pytest.fixture
def refused(tmp_path: Path, tiny_settings: dict[str, Any], rlhf_kl: Cli) -> Callable[..., str]:
    """`refused("data.prompts=...")`: the one line that a run with this change ends with."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))

    def check(*changes: str) -> str:
        sets = [argument for change in changes for argument in ("--set", change)]
        outcome = rlhf_kl("train", "--config", file, "--output-dir", tmp_path / "run", "--quiet", *sets)
        lines = outcome.err.splitlines()
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("error: data.prompts: ")
        assert len(lines[0]) < 600
        return str(lines[0])

    return check


def text(body: str) -> Write:
    return lambda path: Path(path).write_text(body, encoding="utf-8") and None


def raw(body: bytes) -> Write:
    return lambda path: Path(path).write_bytes(body) and None


def parquet(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"prompt": 3}]).to_parquet(str(path))


WRONG: dict[str, tuple[str, Write, str]] = {
    "an empty file": ("p.jsonl", text(""), "holds no rows"),
    "blank lines only": ("p.txt", text("\n \n\n"), "holds no rows"),
    "a header and nothing else": ("p.csv", text("prompt\n"), "holds no rows"),
    "another column": ("p.jsonl", text('{"promt": "ab"}\n'), "row 1 has no column 'prompt'; did you mean promt?"),
    "a semicolon for a comma": ("p.csv", text("prompt;text\na;b\n"), "prompt;text"),
    "mixed types": ("p.jsonl", text('{"prompt": "ab"}\n{"prompt": 7}\n'), "row 2: prompt is int, not text"),
    "a null prompt": ("p.jsonl", text('{"prompt": null}\n'), "row 1: prompt is null, not text"),
    "empty prompts": ("p.jsonl", text('{"prompt": ""}\n'), "none of 1 prompts can be used: 1 empty"),
    "a PDF by another name": ("p.jsonl", raw(PDF), "is not UTF-8 text (byte 10)"),
    "Latin-1": ("p.txt", raw("grün".encode("latin-1")), "is not UTF-8 text (byte 2)"),
    "UTF-16": ("p.csv", raw("prompt\nab\n".encode("utf-16")), "is not UTF-8 text (byte 0)"),
    "a packed file": ("p.jsonl", raw(gzip.compress(b'{"prompt": "ab"}\n')), "is not UTF-8 text (byte 1)"),
    "half a line of JSON": ("p.jsonl", text('{"prompt": "ab"}\n{"prompt": "a'), "line 2: is not JSON"),
    "a list of texts": ("p.json", text('["ab"]'), "row 1: is a str, not a mapping"),
    "one mapping": ("p.json", text('{"prompt": "ab"}'), "holds a dict, not a list of rows"),
    "deep brackets": ("p.json", text("[" * 100_000), "cannot be read"),
    "a number of many digits": ("p.jsonl", text('{"prompt": ' + "9" * 5000 + "}"), "cannot be read"),
    "half a surrogate pair": ("p.jsonl", text('{"prompt": "a\\ud800"}\n'), "half of a surrogate pair"),
    "a 100 MB line": ("p.jsonl", text('{"prompt": "' + "a" * 100_000_000 + '"}\n'), "has 100,000,000 characters"),
    "no parquet": ("p.parquet", raw(b"PAR1 nonsense"), "cannot be read as parquet"),
    "parquet without text": ("p.parquet", parquet, "row 1: prompt is int, not text"),
    "an unclosed quote": ("p.csv", text('prompt\n"ab\n'), "unexpected end of data"),
    "an unknown kind": ("p.xlsx", raw(b"PK"), "unknown file type, use one of .jsonl .json .csv .parquet .txt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_line_says_what_is_wrong(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    file, write, expected = WRONG[name]
    write(tmp_path / file)
    assert expected in refused(f"data.prompts='{tmp_path / file}'")


def test_a_file_that_may_not_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n')
    (tmp_path / "p.jsonl").chmod(0)
    assert "Permission denied" in refused(f"data.prompts='{tmp_path}/p.jsonl'")


def test_a_folder_without_data(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "cannot be read" in refused(f"data.prompts='{tmp_path}/data'")


def test_a_split_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "ab"}\n')
    found = refused(f"data.prompts='{tmp_path}/data'", "data.split=trian")
    assert "has no split 'trian'; did you mean train?" in found


def test_a_name_that_is_neither_here_nor_in_the_cache(refused: Callable[..., str]) -> None:
    assert "the hub cannot be reached, and its cache does not contain it" in refused("data.prompts=nobody/nothing")
    assert "neither a file nor a hub id" in refused("data.prompts='no such thing'")


@pytest.mark.parametrize(
    ("error", "expected"), [("Revision", "has no revision 'v9' of it"), ("Repository", "the hub has no dataset")]
)
def test_what_the_hub_does_not_know(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: str, expected: str
) -> None:
    from huggingface_hub import HfApi, errors

    try:
        import httpx2 as httpx  # of huggingface_hub 2
    except ImportError:
        import httpx

    def answer(*_: Any, **__: Any) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        raise getattr(errors, f"{error}NotFoundError")("404", response=response)

    monkeypatch.setattr(HfApi, "repo_info", answer)
    assert expected in refused("data.prompts=owner/name@v9")


def test_a_folder_and_its_splits_are_read_like_a_hub_id(tmp_path: Path) -> None:
    from rlhf_kl.data.files import load_rows

    (tmp_path / "data").mkdir()
    for split, prompt in (("train", "ab"), ("test", "cd")):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    assert load_rows(str(tmp_path / "data"), "test") == [{"prompt": "cd"}]
    assert load_rows(str(tmp_path / "data"), "train[:1]") == [{"prompt": "ab"}]
