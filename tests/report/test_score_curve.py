"""Curves of which the truth is known, read between a few of their points."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from rlhf_kl.report.score_curve import ScoreCurve

Truth = Callable[[float], float]


def saturating(x: float) -> float:
    return 2.0 * (1.0 - math.exp(-x))


def turning(x: float) -> float:
    """Gao et al. 2022, equation 1 for best of n: d (alpha - beta d)."""
    return x * (1.6 - 0.5 * x)


def curve_through(truth: Truth, *at: float) -> ScoreCurve:
    return ScoreCurve([(x, truth(x)) for x in at])


@pytest.mark.parametrize("at", [(0.3, 1.5, 3.4), (0.5, 3.0), (0.3, 0.6, 2.0, 2.2, 3.4)])
@pytest.mark.parametrize("truth", [saturating, turning])
def test_the_truth_lies_within_the_bounds(truth: Truth, at: tuple[float, ...]) -> None:
    curve = curve_through(truth, *at)
    for i in range(1, 100):
        x = max(at) * i / 100
        reading = curve.at(x)
        assert reading is not None
        assert reading.low - 1e-12 <= truth(x) <= reading.high + 1e-12
        assert reading.low <= reading.gain <= reading.high


def test_straight_lines_were_further_off() -> None:
    """Ends such as those of static in the shipped comparison: sqrt(KL) of 0.3, 1.5 and 3.4."""
    ends = [(x, saturating(x)) for x in (0.3, 1.5, 3.4)]
    curve, straight, cubic = ScoreCurve(ends), 0.0, 0.0
    for (x0, y0), (x1, y1) in pairwise(ends):
        for i in range(1, 20):
            x = x0 + (x1 - x0) * i / 20
            reading = curve.at(x)
            assert reading is not None
            cubic = max(cubic, abs(reading.gain - saturating(x)))
            straight = max(straight, abs(y0 + (y1 - y0) * (x - x0) / (x1 - x0) - saturating(x)))
    assert (straight, cubic) == pytest.approx((0.152, 0.033), abs=0.001)


def test_pchip_by_hand() -> None:
    """Slopes of Fritsch and Butland at (1, 2) between gaps of 1 and 2: 3 / (w1 / 2 + w2 / 0.5), weights 5 and 4."""
    slope = 9 / (5 / 2 + 4 / 0.5)
    reading = ScoreCurve([(1.0, 2.0), (3.0, 3.0)]).at(2.0)
    last = ((2 * 2 + 1) * 0.5 - 2 * 2) / 3  # three-point slope at the end: it points down, so it becomes 0
    assert last < 0
    assert reading is not None
    assert reading.gain == pytest.approx((2 + 3) / 2 + 2 * (slope - 0) / 8)
    assert (reading.low, reading.high) == (2.5, 4.0)  # the line across; the line from 0 carried on


def test_points_that_bend_the_other_way() -> None:
    convex = ScoreCurve([(x, x * x) for x in (1.0, 2.0, 3.0)])
    reading = convex.at(1.5)
    assert reading is not None
    assert reading.low <= 1.5**2 <= reading.high == pytest.approx(2.5)  # the line across


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
