from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.run.jsonl import JsonlWriter, read_jsonl, truncate_after


def test_rows_come_back_and_reach_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 1, "kl/token": 0.1, "alerts": ["a"]})
        assert read_jsonl(path) == [{"step": 1, "kl/token": 0.1, "alerts": ["a"]}]
        writer.write({"step": 2})
        writer.sync()
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"a": math.nan, "b": [math.inf, np.float32(0.5)], "c": {"d": -math.inf}, "e": np.int64(3)})

    def forbidden(name: str) -> float:
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=forbidden)
    assert row == {"a": None, "b": [None, 0.5], "c": {"d": None}, "e": 3}


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-300, 123456789.123456789, 1 / 3]
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"values": values})
    assert read_jsonl(tmp_path / "m.jsonl")[0]["values"] == values


def test_any_text_survives(tmp_path: Path) -> None:
    text = "é 漢 \u2028 \x00 \ud800 \r\n"
    with JsonlWriter(tmp_path / "s.jsonl") as writer:
        writer.write({"response": text})
    assert read_jsonl(tmp_path / "s.jsonl") == [{"response": text}]


def test_unknown_objects_are_an_error(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "m.jsonl") as writer, pytest.raises(TypeError, match="object"):
        writer.write({"a": object()})


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []
    truncate_after(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("tail", [b'{"step": 3, "x', b"\x00\x00\x00", b'{"response": "\xc3'])
def test_torn_last_line_is_left_out_and_not_glued_to_the_next(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


def test_a_whole_last_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


def test_damage_inside_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        read_jsonl(path)


def test_truncate_after_keeps_the_bytes_of_earlier_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"step":1, "x": 1.50}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_after(path, 2)
    assert path.read_text() == '{"step":1, "x": 1.50}\n{"step": 1}\n{"step": 2}\n'
    truncate_after(path, 0)
    assert path.read_text() == ""
