from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf_kl.text import (
    counted,
    cut,
    format_number,
    format_percent,
    hanging,
    read_number,
    safe_text,
    stdout_width,
    with_error,
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain [bold]text[/bold] é 漢 👩‍🔬", "plain [bold]text[/bold] é 漢 👩‍🔬"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b31m\x00\x7f", r"\x9b31m\x00\x7f"),
        ("abc\u202edcba", r"abc\u202edcba"),
        ("\ud800", r"\ud800"),
        ("a\u2028b", r"a\u2028b"),
    ],
)
def test_controls_are_shown_as_text(raw: str, shown: str) -> None:
    assert safe_text(raw) == shown
    assert safe_text(f"{raw}\n", keep_newlines=True).endswith("\n")


def test_a_hanging_indent_fits_the_width_and_keeps_paths_whole() -> None:
    path = "/a/very/long/path/to/a-file-that-has-a-name.py"
    text = f"policy and reference agree; padding changes nothing in {path} or elsewhere"
    lines = hanging(text, 40, 10).split("\n")
    assert " ".join(line.strip() for line in lines) == text
    assert f"{' ' * 10}{path}" in lines
    assert all(line.startswith(" " * 10) for line in lines[1:])
    assert all(len(line) <= 40 for line in [" " * 10 + lines[0], *lines[1:]] if path not in line)


def test_lines_stay_whole_where_stdout_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stdout_width() is None
    assert hanging("word " * 50, None, 5) == "word " * 50
    assert hanging("a   b\nc", None, 2) == hanging("a   b\nc", 40, 2) == "a   b\n  c"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert stdout_width() == 60


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.5, 0.5), (True, None), ("1", None), (None, None), (math.nan, None), (math.inf, None), ([1], None)],
)
def test_only_finite_numbers_are_read(value: Any, number: float | None) -> None:
    assert read_number({"key": value}, "key") == number
    assert read_number({}, "key") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.1, "0.100"), (1.2345, "1.23"), (123.4, "123"), (12345.0, "1.2e+04"), (0.0004, "4.0e-04"),
        (-2.5, "-2.50"), (None, "-"), (math.nan, "-"), (math.inf, "∞"), (-math.inf, "-∞"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text
    assert [format_number(1.23456, digits) for digits in (2, 3, 4)] == ["1.2", "1.23", "1.235"]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(2.138, 0.031, "2.138 ± 0.031"), (48.0, 0.0, "48.00"), (0.0, 0.0, "0"), (1.5, None, "1.500"), (None, 0.1, "")],
)
def test_a_figure_with_its_error(value: float | None, error: float | None, text: str) -> None:
    assert with_error(value, error) == text


def test_shares() -> None:
    shares = [format_percent(0.126), format_percent(0.126, signed=True), format_percent(None), format_percent(math.inf)]
    assert shares == ["13%", "+13%", "-", "∞"]


def test_a_text_that_is_cut_says_so() -> None:
    assert [cut("How does a bicycle", most) for most in (18, -18, 3, -7)] == [
        *["How does a bicycle"] * 2,
        "How…",
        "…bicycle",
    ]
    assert [counted(number, "update") for number in (0, 1, 2)] == ["0 updates", "1 update", "2 updates"]
