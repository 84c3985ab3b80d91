"""`rlhf-kl guide` as a terminal shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.cli import guide

Cli = Callable[..., Any]


@pytest.mark.parametrize("page", guide.PAGES)
def test_no_word_is_cut_in_80_columns(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    guide._show(guide._text(page))
    shown = capsys.readouterr().out
    assert "…" not in shown.replace("...", "")
    assert max(map(len, shown.splitlines())) <= 80
    if page == "kl":
        assert "overoptimised-perplexity" in shown


def test_pictures_and_links_become_words() -> None:
    text = "See [the page on KL](kl.md#units), [that](https://x.org).\n![A curve](../a.png)"
    shown = "See the page on KL (page kl), [that](https://x.org).\n*(Picture: A curve.)*"
    assert guide._for_terminal(text) == shown


def test_a_page_by_any_spelling(rlhf_kl: Cli) -> None:
    assert rlhf_kl("guide", "Coming-From.md").out.startswith("# Coming from")
