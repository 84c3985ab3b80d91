"""Alarms of sampling from another distribution than the one that is computed, and false ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlhf_kl.run.sampling_gap import FIGURES, GapSum

KEY = "policy/logprob_gap"


def row(total: float, squares: float, variance: float, tokens: int) -> dict[str, Any]:
    """A row of an update, from sums over its tokens."""
    return {
        KEY: total / tokens,
        f"{KEY}_stderr": math.sqrt((squares + 2 * variance) / 3) / tokens,
        "rollout/tokens": tokens,
    }


def test_sums_over_the_updates_are_exact() -> None:
    total = GapSum().add(row(3.0, 30.0, 15.0, 10), KEY).add(row(-5.0, 6.0, 12.0, 30), KEY)
    assert total == pytest.approx((-2.0, 20.0 + 10.0, 40.0))
    assert (total.mean, total.stderr) == (pytest.approx(-0.05), pytest.approx(math.sqrt(30) / 40))


@pytest.mark.parametrize("missing", [KEY, f"{KEY}_stderr", "rollout/tokens"])
def test_an_update_that_lacks_a_figure_counts_for_nothing(missing: str) -> None:
    start = GapSum().add(row(3.0, 30.0, 15.0, 10), KEY)
    for value in (None, math.nan):
        assert start.add(row(9.0, 9.0, 9.0, 9) | {missing: value}, KEY) == start


def distributions() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 1001)
    return {
        "two words": np.array([0.5, 0.5]),
        "all but certain": np.array([0.999, 0.001]),
        "hardly ever": np.array([1 - 1e-5, 1e-5]),
        "words of a language": zipf / zipf.sum(),
        "any": rng.dirichlet(np.full(50, 0.1)),
    }


@pytest.mark.parametrize("name", distributions())
@pytest.mark.parametrize("tokens", [3, 200])
def test_honest_sampling_raises_no_alarm_at_any_time(name: str, tokens: int) -> None:
    """1000 runs of 300 updates; the tokens' log-probs may be as skewed as they like."""
    p = np.sort(distributions()[name])[::-1]
    runs, updates = 1000, 300
    gap = np.log(p) - (p * np.log(p)).sum()
    assert np.isfinite(gap).all()
    rng = np.random.default_rng(1)
    counts = rng.multinomial(tokens, p, size=(runs, updates)) if len(p) < 100 else None
    if counts is None:  # a large vocabulary by the two moments of its sums
        draws = rng.choice(gap, size=(runs, updates, 8), p=p)
        tokens = 8
        totals, squares = draws.sum(-1), np.square(draws).sum(-1)
    else:
        totals, squares = counts @ gap, counts @ np.square(gap)
    variance = tokens * (p * gap**2).sum()
    alarms = 0
    for run in range(runs):
        total = GapSum()
        for one, square in zip(totals[run], squares[run], strict=True):
            total = total.add(row(one, square, variance, tokens), KEY)
            if total.shifted:
                alarms += 1
                break
    assert alarms <= 2  # at most 0.5 are expected


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1, 1.5])
def test_another_temperature_is_seen_within_a_few_thousand_tokens(temperature: float) -> None:
    p = 1 / np.arange(1, 101)
    p /= p.sum()
    q = p ** (1 / temperature)
    q /= q.sum()
    gap = np.log(p) - (p * np.log(p)).sum()
    rng, total, seen = np.random.default_rng(0), GapSum(), None
    for update in range(1, 21):
        counts = rng.multinomial(500, q)
        total = total.add(row(counts @ gap, counts @ gap**2, 500 * (p * gap**2).sum(), 500), KEY)
        seen = seen or (update if total.shifted else None)
    assert seen is not None
    assert total.mean == pytest.approx((q * gap).sum(), abs=4 * total.stderr)
    assert (total.mean > 0) == (temperature < 1)


def test_rounding_and_what_bfloat16_does_are_no_alarm() -> None:
    """Between two passes over one text; and a shift of half a percent of a token's spread."""
    total, coarse = GapSum(), GapSum()
    for _ in range(10_000):
        total = total.add(row(1e-6 * 2000, 1e-12 * 2000, 1e-14 * 2000, 2000), KEY)
        coarse = coarse.add(row(0.005 * 2000, 2000, 2000, 2000), KEY)
    assert not total.shifted
    assert not coarse.shifted
    assert coarse.mean / coarse.stderr > 20


def test_every_figure_has_words() -> None:
    for words in FIGURES.values():
        assert "+0.12" in words.format(gap=0.123)
