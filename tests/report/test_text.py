import math

import pytest

from rlhf_kl.report.text import percent, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.1, "0.100"), (1.2345, "1.23"), (123.4, "123"), (12345.0, "1.2e+04"), (0.0004, "4.0e-04"),
        (-2.5, "-2.50"), (None, "-"), (math.nan, "-"), (math.inf, "∞"), (-math.inf, "-∞"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_shares() -> None:
    assert [percent(0.126), percent(0.126, signed=True), percent(None), percent(math.inf)] == ["13%", "+13%", "-", "∞"]
