from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_kl.config.yaml import dump_yaml, parse_yaml, read_yaml
from rlhf_kl.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5", 1e-5),
        ("2.0e-4", 2e-4),
        ("1e5", 100000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("3", 3),
        ("010", 10),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_have_the_types_of_yaml_1_2(text: str, expected: Any) -> None:
    value = parse_yaml(text, where="here")
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["off", "on", "yes", "no", "y", "1.5x", "1:30", "2024-01-01", "1_000", "0x1F", "<<"])
def test_what_yaml_1_1_would_convert_stays_text(text: str) -> None:
    assert parse_yaml(text, where="here") == text


def test_a_quoted_number_is_text_and_nan_is_a_number() -> None:
    assert parse_yaml("'1e-5'", where="here") == "1e-5"
    assert math.isnan(parse_yaml(".nan", where="here"))
    assert parse_yaml("-.inf", where="here") == -math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "here:3:1: key 'a' is written twice"),
        ("a: [1, 2\nb: 3\n", "here:2"),
        ("a: b: c\n", "here:1:5"),
        ("a: 1\n b: 2\n", "here:2:"),
        ("a: !!python/object/apply:os.system ['true']\n", "here:1:4: tag !!python/object/apply:os.system"),
        ("a: !mine 1\n", "here:1:4: tag !mine is not allowed"),
        ("a: !!timestamp 2024-01-01\n", "not allowed"),
        ("a: !!set {x, y}\n", "not allowed"),
        ("a: !!int x\n", "does not fit"),
        ("a: !!bool yes\n", "does not fit"),
        ("a: !!map [1]\n", "does not fit"),
        ("1: a\n", "here:1:1: a key must be text"),
        ("[1]: a\n", "a key must be text"),
        ("a: *nobody\n", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "document"),
        ("a: \x00\n", "here:1"),
        ("a: 1\nb: \x07\n", "here:2: character"),
        ("\ta: 1\n", "here:1"),
        ("%YAML 9.9\n---\na: 1\n", "here"),
        ("a: " + "9" * 6000, "4300 digits"),
        ("a: &x [*x]\n", "recursive"),
        ("a: " + "[" * 3000, "nested too deeply"),
    ],
)
def test_every_mistake_is_one_line_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, where="here")
    [line] = caught.value.problems
    assert line.startswith("here")
    assert expected in line


def test_an_anchor_is_read_twice() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: *x\n", where="here") == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"- 1\n", "must be a mapping"),
        (b"hello\n", "must be a mapping"),
        (b"a: \xff\n", "not UTF-8"),
        ("a: 1\n".encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, data: bytes, expected: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_yaml(file)
    [line] = caught.value.problems
    assert expected in line
    assert line.startswith(str(file))


def test_a_folder_and_a_missing_file_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(InputError):
            read_yaml(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    assert read_yaml(file) == {"a": 1}


scalars = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3))


@example({"name": "a\x85b\u2028c"})
@settings(deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_is_dumped_reads_back(value: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(value), where="here") == value


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_value_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        parse_yaml(text, where="here")
