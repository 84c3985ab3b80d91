"""The arithmetic of scripts/evidence, beside closed forms."""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_kl.config.variants import load_compare
from rlhf_kl.monitors.kl_shares import Part
from tests.runs import Rows, Write

EVIDENCE = Path(__file__).resolve().parents[2] / "scripts" / "evidence"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`script("law")`: a module of the folder, which imports its neighbours by their bare names."""
    monkeypatch.syspath_prepend(str(EVIDENCE))
    names = {file.stem for file in EVIDENCE.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}  # of the same bare name
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def test_the_fit_finds_the_law_that_made_the_points(script: Any) -> None:
    law = script("law")
    points = [(d, d * (2.0 - 0.3 * d)) for d in (0.5, 1.0, 2.0, 3.0)]
    exact = {"alpha": 2.0, "beta": 0.3, "beta_error": 0.0, "r2": 1.0}
    assert law.fit(points, law.LAWS["best_of_n"]) == pytest.approx(exact)
    assert law.fit(points, law.LAWS["rl"])["r2"] < 1.0 - 1e-4
    rng = random.Random(0)
    noisy = [law.fit([(d, y + rng.gauss(0, 0.1)) for d, y in points * 5], law.LAWS["best_of_n"]) for _ in range(300)]
    assert fmean(one["beta_error"] for one in noisy) == pytest.approx(stdev(one["beta"] for one in noisy), rel=0.1)


def test_the_optimum_of_gaussian_scores_and_its_error(script: Any) -> None:
    """The gain is sigma sqrt(2 KL); its error is the spread of that of other samples."""
    frontier, rng = script("frontier"), random.Random(0)
    groups = [f"{i}" for i in range(40) for _ in range(8)]
    every = [
        frontier.Reference([rng.gauss(0, 2) + 5 * int(group) for group in groups], groups).best_with_error(0.5)
        for _ in range(20)
    ]
    gains, errors = map(list, zip(*every, strict=True))
    assert fmean(gains) == pytest.approx(2.0, rel=0.04)
    assert fmean(errors) == pytest.approx(stdev(gains), rel=0.5)
    assert math.isnan(frontier.Reference([rng.gauss(0, 2) for _ in groups], groups).best(30.0))


def test_a_rise_of_the_loss_is_a_mean_over_tokens_with_a_paired_error(script: Any) -> None:
    risen = script("after").risen
    reference = [[30.0, 10], [80.0, 20], [3.0, 2]]
    same = risen([[total + 0.1 * count, count] for total, count in reference], reference)
    assert same["nats"] == pytest.approx(0.1)
    assert same["error"] == pytest.approx(0.0, abs=1e-12)
    assert same["perplexity"] == pytest.approx(math.exp(113 / 32 + 0.1))
    assert risen([[31.0, 10], [79.0, 20], [3.0, 2]], reference)["error"] == pytest.approx(
        math.sqrt((1 + 1) * 3 / 2) / 32, rel=1e-6
    )


def test_the_noise_of_beta_and_shares_of_tokens_by_hand(script: Any) -> None:
    noise = script("estimators").noise_of_beta
    betas = [9.0, 9.0, 1.0, 2.0, 1.0, 1.0]
    run = SimpleNamespace(updates=[{"kl/coef": beta} for beta in betas])
    assert noise(run) == pytest.approx(math.log(2) / 2)  # of 2.0, 1.0, 1.0
    tokens = script("tokens")
    parts = [
        Part("token", " great", 1, 2, 3.0, 1.0),
        Part("token", " the", 2, 6, 1.0, 0.0),
        Part("eos", "", 3, 2, 4.0, -1.0),
        Part("place", "first", None, 5, 6.0, 0.0),
        Part("place", "second to fifth", None, 5, 2.0, 0.0),
    ]
    found = tokens.shares(parts, tokens.is_positive)
    assert found["own words"] == {"kl": 3 / 8, "tokens": 0.2}
    assert found["eos"] == {"kl": 0.5, "tokens": 0.2}
    assert found["first"] == {"kl": 0.75, "tokens": 0.5}


def test_finished_runs_by_variant_and_seed(script: Any, write_run: Write, metrics_rows: Rows, tmp_path: Path) -> None:
    for name in ("plain-0.15-s0", "plain-0.15-s1", "none-s0"):
        write_run(name, metrics_rows([0.1] * 3), summary={})
    write_run("none-s1", metrics_rows([0.1] * 3))
    found = script("common").finished(tmp_path)
    assert {name: list(runs) for name, runs in found.items()} == {"none": [0], "plain-0.15": [0, 1]}


def test_scorers_by_hand(script: Any) -> None:
    scorers = script("scorers")
    prompts, responses = ["Write a goodbye to a colleague."], ["Goodbye. My colleagues sing, sing and sing"]
    assert scorers.overlap(prompts, responses) == [2 / 3]  # of write, goodbye and colleague
    assert scorers.distinct(prompts, responses) == [5 / 7]
    texts = ["It is a cat. And more", "One two.", "It goes on and on", "A word" + " more" * 12 + "."]
    assert scorers.plain([], texts) == [1.0, 0.0, 0.0, 0.0]
    assert scorers.positive([], ["What a great day", "bad"])[0] > 0


@pytest.mark.parametrize("file", [file.name for file in EVIDENCE.glob("*.yaml") if "base:" in file.read_text()])
def test_the_runs_of_the_evidence_can_be_read(file: str) -> None:
    runs = load_compare(str(EVIDENCE / file), []).runs
    assert {run.config.updates for run in runs} == {60}
