from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from rlhf_kl.report.comparison import Comparison
from rlhf_kl.report.equal_kl import ScoreCurve, interval_half

Grid = Callable[..., Comparison]
Truth = Callable[[float], float]

# Ends of `static` far apart, those of `adaptive` inside its gaps: sqrt(KL per response) of 0.4, 3.5 and of 0.9 to 2.
SAME_CURVE = {
    "adaptive-1x": ("adaptive", 0.2, 0.04),
    "adaptive-10x": ("adaptive", 2.0, 0.2),
    "static-0.1x": ("fixed", 0.02, 0.6),
    "static-10x": ("fixed", 2.0, 0.01),
}


def saturating(x: float) -> float:
    return 2.5 * (1.0 - math.exp(-0.9 * x))


def turning(x: float) -> float:
    return x * (1.2 - 0.3 * x)


@pytest.mark.parametrize("truth", [saturating, turning])
def test_families_on_one_curve_do_not_differ(grid: Grid, truth: Callable[[float], float]) -> None:
    """What the gaps between runs make of one and the same curve lies within the interval that is reported."""
    entries = grid(SAME_CURVE, gain=truth).equal_kl
    assert {entry.curve for entry in entries} == {"static"}
    assert len(entries) == 2  # score and gold
    for entry in entries:
        assert entry.interval is not None
        assert entry.mean is not None
        assert entry.interval[0] <= 0 <= entry.interval[1], entry
        assert entry.interval[0] < entry.mean < entry.interval[1]


def test_runs_that_ended_at_one_kl_are_compared_directly(grid: Grid) -> None:
    ends = {"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.1), "c": ("dual", 0.2, 0.102)}
    entries = grid(ends, seeds=1, extra={"a": -1.4, "b": -0.86, "c": -0.4}).equal_kl
    found = {(e.points, e.curve): e for e in entries if e.measure == "scores_shaped"}
    gains = {"a": 2.0 - 1.4, "b": 2.0 - 0.86, "c": math.sqrt(2 * 20 * 0.102) - 0.4}
    assert set(found) == {("b", "a"), ("c", "a"), ("c", "b")}
    for (points, curve), entry in found.items():
        assert entry.mean == pytest.approx(gains[points] - gains[curve])
        assert entry.interval is None
    assert found["b", "a"].bounds == pytest.approx((0.54, 0.54))
    # One percent of sqrt(KL), along the line from the reference to the run.
    low, high = found["c", "b"].bounds or (0.0, 0.0)
    assert (high - low) / 2 == pytest.approx(gains["b"] * (math.sqrt(1.02) - 1))


def test_runs_of_one_family_are_compared_with_one_another(grid: Grid) -> None:
    """Three starting betas are one family: without another one to compare with, its runs are compared."""
    ends = {f"adaptive-{i}x": ("adaptive", 0.1 * i, 0.1) for i in (1, 2, 3)}
    comparison = grid(ends, seeds=2, extra={"adaptive-3x": 0.5})
    assert len(comparison.families) == 1
    means = {(e.points, e.curve): e.mean for e in comparison.equal_kl if e.measure == "scores_shaped"}
    assert means == {
        ("adaptive-2x", "adaptive-1x"): pytest.approx(0.0),
        ("adaptive-3x", "adaptive-1x"): pytest.approx(0.5),
        ("adaptive-3x", "adaptive-2x"): pytest.approx(0.5),
    }


def test_scores_of_a_seed_are_compared_on_one_scale(grid: Grid) -> None:
    """By hand: both end at a raw score of 3; a has measured mean 1 and standard deviation 2 of its reference, b 0.5, 1.

    So their shaped scores are 1 and 2.5. On the scale of b, which has more samples, both are 2.5, 2.5 above its start.
    """
    ends = {"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.1)}
    scales = {"a": {"mean": 1.0, "std": 2.0}, "b": {"mean": 0.5, "std": 1.0}}

    def reference(name: str, seed: int) -> dict[str, Any]:
        return {"scale": scales[name], "samples": {"a": 120, "b": 240}[name], "scores_shaped": 0.0}

    comparison = grid(ends, seeds=1, gain=lambda _: 0.0, extra={"a": 1.0, "b": 2.5}, reference=reference)
    assert [comparison.ends(variant)[0][1] for variant in comparison.variants] == pytest.approx([2.5, 2.5])
    assert [e.mean for e in comparison.equal_kl if e.measure == "scores_shaped"] == [pytest.approx(0.0)]


def test_single_runs_at_different_kls_are_not_compared(grid: Grid) -> None:
    assert grid({"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.13)}, seeds=1).equal_kl == []


@pytest.mark.parametrize(("count", "quantile"), [(5, 2.776), (30, 2.045)])
def test_the_interval_of_student(count: int, quantile: float) -> None:
    """Quantiles of a printed table."""
    values = [float(i) for i in range(count)]
    sd = math.sqrt(sum((v - fmean(values)) ** 2 for v in values) / (count - 1))
    assert interval_half(values) == pytest.approx(quantile * sd / math.sqrt(count), rel=2e-4)
    assert interval_half([1.0, 2.0, 3.0, 4.0]) is None


def test_many_pairs_without_a_difference_are_rarely_called_different() -> None:
    """Of three groups alike: one of 20 comparisons at most names a difference, though it looks at three pairs."""
    draws, wrong, alone = random.Random(0), 0, 0
    for _ in range(400):
        values = [[draws.gauss(0, 1) for _ in range(6)] for _ in range(3)]
        gaps = [[a - b for a, b in zip(one, other, strict=True)] for one, other in combinations(values, 2)]
        wrong += any(abs(fmean(gap)) > (interval_half(gap, 3) or 0.0) for gap in gaps)
        alone += any(abs(fmean(gap)) > (interval_half(gap) or 0.0) for gap in gaps)
    assert wrong <= 0.05 * 400 < 0.08 * 400 < alone


def test_the_intervals_of_all_pairs_of_a_comparison_hold_together(grid: Grid) -> None:
    ends = {name: (kind, 0.2, 0.1) for name, kind in (("a", "adaptive"), ("b", "pid"), ("c", "dual"))}
    three, two = grid(ends).equal_kl, grid({"d": ends["a"], "e": ends["b"]}).equal_kl
    assert {entry.together for entry in three} == {3}
    assert {entry.together for entry in two} == {1}


# ---- curves of which the truth is known, read between a few of their points


def curve_through(truth: Truth, *at: float) -> ScoreCurve:
    return ScoreCurve([(x, truth(x)) for x in at])


@pytest.mark.parametrize("at", [(0.5, 3.0), (0.3, 0.6, 2.0, 2.2, 3.4)])
@pytest.mark.parametrize("truth", [saturating, turning])
def test_the_truth_lies_within_the_bounds(truth: Truth, at: tuple[float, ...]) -> None:
    curve = curve_through(truth, *at)
    for i in range(1, 100):
        x = max(at) * i / 100
        reading = curve.at(x)
        assert reading is not None
        assert reading.low - 1e-12 <= truth(x) <= reading.high + 1e-12
        assert reading.low <= reading.gain <= reading.high


def test_pchip_by_hand() -> None:
    """Slopes of Fritsch and Butland at (1, 2) between gaps of 1 and 2: 3 / (w1 / 2 + w2 / 0.5), weights 5 and 4."""
    slope = 9 / (5 / 2 + 4 / 0.5)
    reading = ScoreCurve([(1.0, 2.0), (3.0, 3.0)]).at(2.0)
    last = ((2 * 2 + 1) * 0.5 - 2 * 2) / 3  # three-point slope at the end: it points down, so it becomes 0
    assert last < 0
    assert reading is not None
    assert reading.gain == pytest.approx((2 + 3) / 2 + 2 * (slope - 0) / 8)
    assert (reading.low, reading.high) == (2.5, 4.0)  # the line across; the line from 0 carried on


def test_nothing_is_extrapolated() -> None:
    curve = ScoreCurve([(3.0, 6.0), (1.0, 2.0)])
    assert curve.at(0.5) == pytest.approx((1.0, 1.0, 1.0))  # from the reference on
    assert curve.at(3.2) is None
    assert ScoreCurve([(0.0, 0.1)]).at(1.0) is None


def test_one_run_tells_its_own_kl_only() -> None:
    curve = ScoreCurve([(1.0, 2.0)])
    assert curve.at(1.0) == (2.0, 2.0, 2.0)
    assert curve.at(0.97) == pytest.approx((2.0, 1.94, 2.06))  # by the slope from the reference
    assert curve.at(0.9) is None
    assert curve.at(1.1) is None


def test_ends_at_the_same_kl_are_one_point() -> None:
    curve = ScoreCurve([(1.0, 2.0), (1.01, 1.0), (2.0, 3.0)])
    assert curve.points == [(0.0, 0.0), (1.005, 1.5), (2.0, 3.0)]
