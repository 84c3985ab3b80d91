from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_kl.commands.compare import write_comparison
from rlhf_kl.report.compare import read_comparison

if TYPE_CHECKING:
    from tests.report.pages.conftest import Browser


@pytest.fixture
def page(write_run: Callable[..., Path], metrics_rows: Callable[..., Any], tmp_path: Path) -> Path:
    """compare.html of adaptive and static runs, a name full of markup among them."""
    tilt = [{"coef": 0.1 * i, "kl": 2.0 / i**2, "gain": 2.0 / i} for i in range(1, 12)]
    best = [{"n": 2**i, "kl_bound": 0.5 * i, "gain": 0.5 * i, "gold_gain": 0.2 * i} for i in range(5)]
    reference = {"scores_shaped": 0.0, "scores_spread": 1.0, "gold": 0.0, "tilt": tilt, "best_of_n": best}
    variants = [
        ("adaptive", "adaptive", 0.2, 0.1), ("$<b>static</b>$-0.1x", "fixed", 0.02, 3.0),
        ("$<b>static</b>$-1x", "fixed", 0.2, 0.1), ("$<b>static</b>$-10x", "fixed", 2.0, 0.01),
    ]  # fmt: skip
    for name, kind, coef, kl in variants:
        for seed in range(5):
            rows = metrics_rows([kl * (1 + 0.02 * seed) * min(1, step / 10) for step in range(60)], coef=coef)
            config = {"run": {"seed": seed}, "kl": {"controller": {"kind": kind, "coef": coef}}}
            write_run(f"{name.replace('/', '')}-s{seed}", rows, config=config, summary={"reference": reference})
    write_comparison(read_comparison([tmp_path]), tmp_path / "out", "my <i>comparison</i>")
    return tmp_path / "out" / "compare.html"


def test_in_a_real_browser(browser: Browser, page: Path) -> None:
    for width, dark in ((1400, False), (390, True)):
        browser.open(page, width, dark=dark)
        assert browser.errors == []
        assert browser.requests == [page.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.overlaps() == []
    assert browser.evaluate("document.title") == "my <i>comparison</i>: comparison"
    assert browser.evaluate("document.querySelectorAll('main b, main i, main script').length") == 0
    text = browser.evaluate("document.body.textContent")
    assert "$<b>static<b>$-0.1x: off the target" in text
    assert "adaptive held the target of 0.1 nats per token" in text
    assert browser.evaluate("document.querySelectorAll('svg.chart').length") == 13
    tips = browser.evaluate("[...document.querySelectorAll('.hit')].map(hit => hit.dataset.tip)")
    assert "best of 8: √KL at most 1.22, gain 1.50" in tips
    assert any(re.fullmatch(r"update 60: .*adaptive 0\.104.*", tip) for tip in tips)


def test_pictures_are_small_and_whole(page: Path) -> None:
    pictures = {path.stem: path.stat().st_size for path in page.parent.glob("*.png")}
    assert set(pictures) == {
        *("compare", "kl", "score", "perplexity", "beta", "gold"),
        *("frontier", "frontier-gold", "kl-beta", "total-reward"),
    }
    assert max(pictures.values()) < 200_000
