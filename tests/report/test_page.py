"""The pages: one file each, with the text of runs as text."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from rlhf_kl.monitors.kl_shares import kl_parts
from rlhf_kl.report.charts import run_charts
from rlhf_kl.report.comparison import read_comparison
from rlhf_kl.report.one_run import read_run
from rlhf_kl.report.page import report_page
from rlhf_kl.report.sentences import judge
from rlhf_kl.report.side_by_side import write_comparison
from rlhf_kl.report.token_tables import TITLE
from tests.runs import Rows, Write, jsonl

HOSTILE = '</p><script>document.title="owned"</script><img src=x onerror="1"> \x1b[2J \u202e &amp; {{ 7*7 }}'
TILT = [{"coef": 0.1 * i, "kl": 2.0 / i**2, "gain": 2.0 / i} for i in range(1, 12)]
BEST = [{"n": 2**i, "kl_bound": 0.5 * i, "gain": 0.5 * i} for i in range(5)]
REFERENCE = {"scores_shaped": 0.0, "scores_spread": 1.0, "tilt": TILT, "best_of_n": BEST}
KLS = [0.0, *(0.01 * i for i in range(1, 11)), *[0.1] * 10]


def sample(step: int, response: str, kl: float = 0.3) -> dict[str, Any]:
    tokens = [
        {"text": word, "logprob": -0.5, "ref_logprob": -1.5, "kl": kl} for word in re.split("(?<= )", response) if word
    ]
    return {
        "step": step, "prompt": f"A prompt {HOSTILE}", "response": response, "score": 1.0, "gold": None,
        "kl": kl * len(tokens), "tokens": tokens,
    }  # fmt: skip


def held_out(steps: list[int], last: str = "good") -> list[dict[str, Any]]:
    """Rows of a held-out prompt at these steps; the last response is given, and the reference says "plain"."""
    rows = [sample(step, last if step == steps[-1] else f"at {step}") | {"chosen": "held out"} for step in steps]
    rows[0]["reference"] = {"response": "plain", "score": 0.5, "gold": None}
    return rows


@pytest.fixture
def page(write_run: Write, metrics_rows: Rows) -> str:
    """The report of a run full of hostile text."""
    rows = metrics_rows(KLS)
    rows[12]["alerts"] = [f"kl-spike: {HOSTILE}"]
    samples = held_out([1, 6, 11, 16, 22], f"end {HOSTILE}")
    config = {"ppo": {"total_episodes": 64 * len(KLS)}, "policy": {"model": "a/<b>model</b>"}}
    config |= {"data": {"prompts": "p.txt"}, "eval": {"texts": "t.txt"}, "reward": {"model": "a/b"}}
    summary = {"versions": {"torch": "<i>2</i>"}, "seconds": 90, "tilt_share": 0.8, "reference": REFERENCE}
    return report_page(read_run(write_run("evil$run_<b>$", rows, samples, config, summary)))


def test_one_file_that_shows_text_as_text_and_answers_on_its_first_screen(page: str) -> None:
    """The verdict, three large figures, and the texts of one prompt before, on the way and after."""
    # It names no other file.
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= names
    assert not re.search(r"<(?:link|img|iframe|object|embed|base)\b|@import", page)
    assert len(page) < 1_000_000
    assert page.count("<svg") == 4
    # Text of the run is text.
    assert page.count("<script") == 1  # the page's own
    text = unescape(page)
    assert text.count('<script>document.title="owned"</script>') >= 3  # prompt, response, alert
    assert "{{ 7*7 }}" in text
    assert r"\x1b[2J" in text
    assert r"\u202e" in text
    assert "\x1b" not in page
    assert "kl-spike" in text
    assert 'data-tip="end␣  log π' in text
    # The first screen.
    first = page.partition("<h2>Curves")[0]
    assert '<span class="status good">target 0.1 held (off by' in first
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)<", first.partition("<details>")[0]) == [
        ("KL", "0.100 of 0.1"), ("Score", "1.00 → 3.00"), ("Held-out perplexity", "3.00 → 3.10"),
    ]  # fmt: skip
    assert re.findall(r"<h3>(.*?)</h3>", first) == ["Before (the start)", "Update 11", "After"]


def test_each_scorer_that_never_trains_has_a_figure_and_a_curve(write_run: Write, metrics_rows: Rows) -> None:
    """The true score in the picture of the score, whose scale it shares."""
    rows = metrics_rows(KLS)
    for row in rows:
        if "eval/perplexity" in row:
            row |= {"eval/polite": row["step"] / 4, "eval/polite_stderr": 0.125, "eval/silent": None}
    samples = [{**each, "polite": 0.75, "gold": -1.0} for each in held_out([1, 22])]
    scorers = {name: {"kind": f"mine.py:{name}"} for name in ("polite", "silent")}
    run = read_run(write_run("watched", rows, samples, {"eval": {"scorers": scorers}}))
    first, _, rest = report_page(run).partition("<h2>Curves")
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)<", first.partition("<details>")[0])
    assert [each[0] for each in found] == ["KL", "Score", "Polite", "True score", "Held-out perplexity"]
    assert found[2][1:] == ("0.250 → 5.50", "in the evaluations, ±0.125 at the end")
    assert "true score -1.00 · polite 0.750" in first
    assert re.findall(r"<h3>(.*?)</h3>", rest)[1:4] == ["Score", "polite", "Perplexity and forgetting"]
    lines = {line.label: line for chart in run_charts(run) for line in chart.lines}
    assert (lines["polite"].x, lines["polite"].y) == ([1, 11, 21, 22], [0.25, 2.75, 5.25, 5.5])
    assert list(lines["polite"].low) == [0.125, 2.625, 5.125, 5.375]
    assert lines["true score"].x == [1, 11, 21, 22]


def carriers(path: Path, *kls: float) -> Path:
    """Writes the KL by token of a run: of hostile tokens, and of EOS in the end."""
    named = {i: ("token", f"{i}{HOSTILE}") for i in range(len(kls) - 1)} | {len(kls) - 1: ("eos", "<eos>")}
    parts = kl_parts([[range(len(kls)), kls, [0.0] * len(kls), kls]], named)
    return Path(jsonl(path / "tokens.jsonl", [{"step": 22} | asdict(part) for part in parts])).parent


@pytest.mark.slow
def test_the_tokens_that_carry_the_kl_of_a_run_and_of_variants(write_run: Write, metrics_rows: Rows) -> None:
    """Of a variant all seeds count together; one whose run has no evaluation has no table."""
    rows, runs = metrics_rows(KLS), []
    for seed, kls in enumerate([(3.0, 1.0, 0.0), (0.0, 1.0, 3.0)]):
        runs.append(carriers(write_run(f"one-s{seed}", rows, config={"run": {"seed": seed}}), *kls))
    runs.append(write_run("bare", rows, config={"kl": {"target": 0.2}}))
    page, bare = (report_page(read_run(run)) for run in (runs[0], runs[2]))
    title = f"<h2>{TITLE}"
    assert (page.count(title), bare.count(title)) == (1, 0)
    table = unescape(page.partition(title)[2])
    assert re.findall(r">([\d.]+%)<", table) == ["75.0%", "25.0%", "0.0%", "100.0%", "75.0%", "25.0%", "100.0%"]
    assert "0" + HOSTILE[:9] in table
    assert page.count("<script") == 1
    out = runs[0].parent / "out"
    write_comparison(read_comparison(runs), out, "both")
    found = json.loads((out / "compare.json").read_text())["variants"]
    one = found["one"]["kl_by_token"]
    assert [(row["id"], row["count"], row["kl"]) for row in one["tokens"]] == [(0, 2, 3.0), (1, 2, 2.0), (2, 2, 3.0)]
    assert found["bare"]["kl_by_token"] is None
    text = (out / "compare.html").read_text()
    assert (text.count(title), text.count("<details><summary>one: ")) == (1, 1)
    assert "<script" not in text


def test_a_run_that_has_only_begun(write_run: Write) -> None:
    text = report_page(read_run(write_run("empty")), refresh=10)
    assert "unfinished: 0 of 60 updates" in text
    assert '<meta http-equiv="refresh" content="10">' in text


@pytest.mark.slow
def test_the_page_and_the_pictures_of_a_comparison(write_run: Write, metrics_rows: Rows, tmp_path: Path) -> None:
    for name, kind, coef, kl in [
        ("adaptive", "adaptive", 0.2, 0.1), ("$<b>static<i>$-0.1x", "fixed", 0.02, 3.0),
        ("$<b>static<i>$-1x", "fixed", 0.2, 0.1), ("$<b>static<i>$-10x", "fixed", 2.0, 0.01),
    ]:  # fmt: skip
        rows = metrics_rows([kl * min(1, step / 10) for step in range(60)], coef=coef)
        config = {"kl": {"controller": {"kind": kind, "coef": coef}}}
        for seed in (0, 1):
            samples = held_out([1, 61], f"says {name}")
            settings = config | {"run": {"seed": seed}}
            write_run(f"{name}-s{seed}", rows, samples, settings, summary={"reference": REFERENCE})
    shown = write_comparison(read_comparison([tmp_path]), tmp_path / "out", "my <i>comparison</i>", 80)
    text = (tmp_path / "out" / "compare.html").read_text()
    assert not re.search(r"<[bi]>", text)
    assert "$<b>static<i>$-0.1x" in unescape(text)
    assert "$<b>static<i>$-0.1x: 30x the target" in unescape(text)
    assert "up to 30x" in text
    assert text.count("<svg") == 4 + 7
    places = re.findall(r'<a href="([^"]+)">seed [01]</a>', text)
    assert len(places) == 8
    assert all((tmp_path / "out" / unquote(place)).is_file() for place in places)
    responses = [unescape(each) for each in re.findall(r'tokens">(.*?)<', text)]
    assert responses[:3] == ["plain", "says $<b>static<i>$-0.1x", "says $<b>static<i>$-10x"]
    told = "KL target of 0.1 nats per token: held by adaptive (off by 0% on average); "
    assert " ".join(shown.split()).startswith(told)
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1])  # the last is the path
    assert "says adaptive" in shown
    assert "best of n 0 to 2" in text  # for who cannot see the chart
    assert "<script" not in text
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"compare", "score", "eval-gold", "beta", "perplexity", "frontier", "kl-beta", "total-reward"}


def test_a_scorer_that_falls_while_the_score_rises_is_in_the_headline(write_run: Write, metrics_rows: Rows) -> None:
    """By two standard errors of both evaluations; a fall within them, or beside a score that stays, is none."""
    config = {"eval": {"scorers": {"overlap": {"model": "a/b"}, "steady": {"model": "a/b"}}}}
    errors = {f"eval/{name}_stderr": 0.1 for name in ("scores", "overlap", "steady")}
    for name, score, told in (("rises", 1.0, True), ("stays", 0.2, False)):
        rows = metrics_rows([0.1] * 20)
        ends = [row for row in rows if "eval/perplexity" in row]
        for row in ends:
            row |= errors | {"eval/scores": 0.0, "eval/overlap": 0.5, "eval/steady": 0.5}
        ends[-1] |= {"eval/scores": score, "eval/overlap": 0.1, "eval/steady": 0.3}
        run = read_run(write_run(name, rows, config=config | {"ppo": {"total_episodes": 64 * 20}}))
        assert run.fallen == ["overlap"] * told
        words = "The score rose, and overlap, which never trained, fell: read the texts."
        assert (words in report_page(run)) == told
        assert (words.replace("The", f"In {name} the") in judge(read_comparison([run.path]))) == told
