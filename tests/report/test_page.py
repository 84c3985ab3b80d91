"""The pages: one file each, with the text of runs as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.commands.report import write_comparison
from rlhf_kl.report.compare import read_comparison
from rlhf_kl.report.page import report_page
from rlhf_kl.report.run import read_run

HOSTILE = '</p><script>document.title="owned"</script><img src=x onerror="1"> \x1b[2J \u202e &amp; {{ 7*7 }}'
TILT = [{"coef": 0.1 * i, "kl": 2.0 / i**2, "gain": 2.0 / i} for i in range(1, 12)]
BEST = [{"n": 2**i, "kl_bound": 0.5 * i, "gain": 0.5 * i, "gold_gain": 0.2 * i} for i in range(5)]
REFERENCE = {"scores_shaped": 0.0, "scores_spread": 1.0, "gold": 0.0, "tilt": TILT, "best_of_n": BEST}
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
def page(write_run: Callable[..., Path], metrics_rows: Callable[..., Any]) -> str:
    """The report of a run full of hostile text."""
    rows = metrics_rows(KLS)
    rows[12]["alerts"] = [f"kl-spike: {HOSTILE}"]
    columns = {"columns": {f"answer {HOSTILE}": HOSTILE}}
    samples = [sample(1, "good food good food", 0.0) | columns, sample(20, f"good {HOSTILE} good")]
    config = {"ppo": {"total_episodes": 64 * len(KLS)}, "policy": {"model": "a/<b>model</b>"}}
    config |= {"data": {"prompts": "p.txt"}, "eval": {"texts": "t.txt"}, "reward": {"model": "a/b"}}
    summary = {"versions": {"torch": "<i>2</i>"}, "seconds": 90, "tilt_share": 0.8, "reference": REFERENCE}
    return report_page(read_run(write_run("evil$run_<b>$", rows, samples, config, summary)))


def test_one_file_that_names_no_other(page: str) -> None:
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= names
    assert not re.search(r"<(?:link|img|iframe|object|embed|base)\b|@import", page)
    assert len(page) < 1_000_000
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert page.count("<svg") == 7


def test_text_of_a_run_is_text(page: str) -> None:
    assert page.count("<script") == 1  # the page's own
    text = unescape(page)
    assert text.count('<script>document.title="owned"</script>') >= 3  # prompt, response, alert
    assert "{{ 7*7 }}" in text
    assert r"\x1b[2J" in text
    assert r"\u202e" in text
    assert "\x1b" not in page
    assert "kl-spike" in text
    assert 'data-tip="good␣  log π' in text


def test_a_run_that_has_only_begun(write_run: Callable[..., Path]) -> None:
    text = report_page(read_run(write_run("empty")), refresh=10)
    assert "unfinished: 0 of 60 updates" in text
    assert '<meta http-equiv="refresh" content="10">' in text


def test_the_page_and_the_pictures_of_a_comparison(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], tmp_path: Path
) -> None:
    for name, kind, coef, kl in [
        ("adaptive", "adaptive", 0.2, 0.1), ("$<b>static<i>$-0.1x", "fixed", 0.02, 3.0),
        ("$<b>static<i>$-1x", "fixed", 0.2, 0.1), ("$<b>static<i>$-10x", "fixed", 2.0, 0.01),
    ]:  # fmt: skip
        rows = metrics_rows([kl * min(1, step / 10) for step in range(60)], coef=coef)
        config = {"kl": {"controller": {"kind": kind, "coef": coef}}}
        write_run(f"{name}-s0", rows, config=config, summary={"reference": REFERENCE})
    write_comparison(read_comparison([tmp_path]), tmp_path / "out", "my <i>comparison</i>")
    text = (tmp_path / "out" / "compare.html").read_text()
    assert not re.search(r"<[bi]>", text)
    assert "$<b>static<i>$-0.1x: off the target" in unescape(text)
    assert text.count("<svg") == 4 + 6
    assert "best of n 1.50" in text  # at the pointer
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"compare", "score", "beta", "perplexity", "frontier", "kl-beta", "total-reward"}
