from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf_kl.config.yaml import dump_yaml, parse_yaml, read_yaml
from rlhf_kl.errors import InputError

SAME = ["off", "on", "yes", "no", "y", "1.5x", "1:30", "2024-01-01", "1_000", "0x1F", "<<"]  # text, unlike in YAML 1.1
VALUES = [
    *(("1e-5", 1e-5), ("2.0e-4", 2e-4), ("-.5", -0.5), ("1.", 1.0), ("3", 3), ("010", 10), ("-.inf", -math.inf)),
    *(("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None), ("'1e-5'", "1e-5"), ("|\n  1", "1")),
    *((text, text) for text in SAME),
]


@pytest.mark.parametrize(("text", "expected"), VALUES)
def test_values_have_the_types_of_yaml_1_2(text: str, expected: Any) -> None:
    value = parse_yaml(text, where="here")
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", "here:2"),
        ("a: b: c\n", "here:1:5"),
        ("a: !!python/object/apply:os.system ['true']\n", "here:1:4: "),
        ("1: a\n", "here:1:1: "),
        ("a: *nobody\n", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "document"),
        ("a: 1\nb: \x07\n", "special characters"),
        ("a: " + "9" * 6000, "4300 digits"),
        ("a: 1\nb: &r {kind: x, extra: *r}\n", "here:2:4: holds itself"),
        ("a: &r [1, {b: *r}]\n", "here:1:4: holds itself"),
        ("[" * 5000, "here:1:52: nested"),
        ("a:\n  " + "- " * 60 + "1", "50 levels"),
        ('a: "x \\ud83d"', "here:1:4: half"),
        ('"\\udc00": 1', "here:1:1: half"),
    ],
)
def test_every_mistake_is_one_line_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, where="here")
    [line] = caught.value.problems
    assert line.startswith("here")
    assert expected in line


def test_two_halves_of_a_pair_are_one_character() -> None:
    """As `json.dumps` writes it, whose text is YAML too."""
    assert parse_yaml('a: "\\ud83d\\ude42"', where="here") == {"a": "\U0001f642"}


def test_an_anchor_is_read_twice() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: *x\n", where="here") == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"# only a comment\n", "empty"),
        (b"- 1\n", "must be a mapping"),
        (b"a: \xff\n", "not UTF-8"),
        ("a: 1\n".encode("utf-16"), "but UTF-16"),
        (None, "No such file"),
        (b"\xef\xbb\xbfa: 1\r\n", {"a": 1}),  # a byte order mark is no part of the first key
    ],
)
def test_a_file_is_a_mapping_or_one_line(tmp_path: Path, data: bytes | None, expected: Any) -> None:
    file = tmp_path / "x.yaml"
    if data is not None:
        file.write_bytes(data)
    if isinstance(expected, dict):
        assert read_yaml(file) == expected
        return
    with pytest.raises(InputError) as caught:
        read_yaml(file)
    [line] = caught.value.problems
    assert line.startswith(str(file))
    assert expected in line


scalars = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3))


@example({"name": "a\x85b\u2028c", "1e5": "1e5", "off": "off", "~": "~"})
@settings(deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_is_dumped_reads_back(value: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(value), where="here") == value
