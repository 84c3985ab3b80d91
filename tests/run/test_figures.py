import math
from typing import Any

import pytest

from rlhf_kl.run.figures import format_number, format_percent, read_number


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


def test_more_and_fewer_digits() -> None:
    assert [format_number(1.23456, digits) for digits in (2, 3, 4)] == ["1.2", "1.23", "1.235"]


def test_shares() -> None:
    shares = [format_percent(0.126), format_percent(0.126, signed=True), format_percent(None), format_percent(math.inf)]
    assert shares == ["13%", "+13%", "-", "∞"]
