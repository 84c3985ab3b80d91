from __future__ import annotations

import pytest

from rlhf_kl.tracking.text import safe_text


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


def test_newlines_can_stay() -> None:
    assert safe_text("a\nb\x07", keep_newlines=True) == "a\nb\\x07"
