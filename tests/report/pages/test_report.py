from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_kl.report.pages.report import diverging_tokens, report_page, visible_blanks
from rlhf_kl.report.run import read_run

if TYPE_CHECKING:
    from tests.report.pages.conftest import Browser

HOSTILE = (
    '</p><script>document.title="owned"</script><img src=x onerror="document.title=1"> \x1b[2J \u202e &amp; {{ 7*7 }}'
)
KLS = [0.0, *(0.01 * i for i in range(1, 11)), *[0.1] * 10]


def sample(step: int, response: str, kl: float = 0.3) -> dict[str, Any]:
    tokens = [
        {"text": word, "logprob": -0.5, "ref_logprob": -1.5, "kl": kl} for word in re.split("(?<= )", response) if word
    ]
    return {
        "step": step, "prompt": f"A prompt {HOSTILE}", "response": response, "score": 1.0, "gold": None,
        "kl": kl * len(tokens), "tokens": tokens,
    }  # fmt: skip


@pytest.fixture
def page(write_run: Callable[..., Path], metrics_rows: Callable[..., Any], tmp_path: Path) -> Path:
    """The report of a run full of hostile text."""
    rows = metrics_rows(KLS)
    rows[12]["alerts"] = [f"kl-spike: {HOSTILE}"]
    rows[5]["alerts"] = ["kl-climbing: it climbs"]
    columns = {"columns": {f"answer {HOSTILE}": HOSTILE}}
    samples = [sample(1, "good food good food", 0.0) | columns, sample(20, f"good {HOSTILE} good") | {"columns": [1]}]
    config = {"ppo": {"total_episodes": 64 * len(KLS)}, "policy": {"model": "a/<b>model</b>"}}
    config |= {"data": {"prompts": "p.txt"}, "eval": {"texts": "t.txt"}, "reward": {"model": "a/b"}}
    summary = {"versions": {"torch": "<i>2</i>"}, "git": None, "seconds": 90, "tilt_share": 0.8, "reference": {}}
    run = read_run(write_run("evil$run_<b>$", rows, samples, config, summary))
    file = tmp_path / "report.html"
    file.write_text(report_page(run), encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_in_a_real_browser(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    assert browser.evaluate("document.title") == "evil$run_<b>$: KL report"
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("innerWidth") == width
    # Nothing is cut off at the side, and no label of a chart lies on another one.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.overlaps() == []
    assert browser.evaluate("document.querySelectorAll('svg.chart').length") >= 10
    assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 23, 26)" if dark else "rgb(255, 255, 255)")
    line = "getComputedStyle(document.querySelector('svg.chart path[style*=\"--c1\"]')).stroke"
    assert browser.evaluate(line) == ("rgb(93, 183, 240)" if dark else "rgb(0, 114, 178)")


def test_hover_text_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page, 1400)
    chart = "document.querySelector('.probe')"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    box = browser.evaluate(f"{chart}.querySelectorAll('.hit')[12].getBoundingClientRect().toJSON()")
    browser.point_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    output = f"{chart}.parentElement.querySelector('output').textContent"
    assert browser.evaluate(output).startswith("update 13: KL 0.100, kl-spike")
    browser.point_at(2, 2)
    assert browser.evaluate(output) == ""
    browser.evaluate(f"{chart}.focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(output) == "update 1: KL 0"
    browser.press("End")
    assert browser.evaluate(output) == "update 21: KL 0.100"
    token = "document.querySelectorAll('.tokens')[1].querySelector('[data-tip]')"
    assert browser.evaluate(f"{token}.title") == "good␣  log π -0.500, log ref -1.50, KL 0.300"
    assert browser.evaluate(f"{token}.style.background") != ""


def test_hostile_text_is_shown_as_text(browser: Browser, page: Path) -> None:
    browser.open(page, 1400)
    text = browser.evaluate("document.body.textContent")
    assert text.count('<script>document.title="owned"</script>') >= 3  # prompt, response, alert
    assert "{{ 7*7 }}" in text
    assert r"\x1b[2J" in text
    assert r"\u202e" in text
    assert browser.evaluate("document.title").startswith("evil")


def test_one_file_that_names_no_other(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"<(?:link|img|iframe|object|embed|base)\b|@import", re.sub(r"&lt;", "", text))
    assert len(text) < 1_000_000
    assert len(re.findall(r'\bid="([^"]+)"', text)) == len(set(re.findall(r'\bid="([^"]+)"', text)))


def test_a_run_that_has_only_begun(write_run: Callable[..., Path], browser: Browser, tmp_path: Path) -> None:
    run = read_run(write_run("empty"))
    assert run.notes == ["metrics.jsonl is missing: no update has been written yet", "unfinished: 0 of 60 updates"]
    file = tmp_path / "empty.html"
    file.write_text(report_page(run, refresh=10))
    browser.open(file, 390)
    assert browser.errors == []
    assert "no update has been written" in browser.evaluate("document.body.textContent")
    assert browser.evaluate("document.querySelector('meta[http-equiv=refresh]').content") == "10"


def test_the_tokens_that_diverge_most() -> None:
    samples = [sample(step, "a b ", 0.1) for step in (1, 2)] + [sample(3, "c c d ", 2.0), sample(4, "a ", 0.5)]
    table = diverging_tokens(samples)
    # The last three sampled steps; `d` was seen once only.
    assert table == [
        ["c␣", "2", "2.00", "-0.500", "-1.50", "2.72"],  # e to the power of -0.5 + 1.5
        ["a␣", "2", "0.300", "-0.500", "-1.50", "2.72"],
    ]


@pytest.mark.parametrize(
    ("token", "shown"), [(" a", "␣a"), ("  ", "␣␣"), ("\n", r"\n"), ("", "∅"), ("\u202eab", r"\u202eab")]
)
def test_blanks_of_a_token_can_be_seen(token: str, shown: str) -> None:
    assert visible_blanks(token) == shown
