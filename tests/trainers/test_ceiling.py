"""The belt on an analytic KL: that of a point at `p` is |p|^2."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlhf_kl.trainers.ceiling import Cut, KLForecast, shorten_update


class Point:
    """A policy of two tensors whose KL is known."""

    def __init__(self, start: float, end: float, kl: Callable[[float], float] = lambda x: x * x) -> None:
        self.parameters = [nn.Parameter(torch.tensor([end])), nn.Parameter(torch.tensor([-end, 0.0]))]
        self.before = [torch.tensor([start]), torch.tensor([-start, 0.0])]
        self.law, self.measured = kl, 0

    @property
    def place(self) -> float:
        first, second = (float(p.detach()[0]) for p in self.parameters)
        assert second == pytest.approx(-first)  # all tensors move together
        return first

    def kl(self) -> float:
        self.measured += 1
        return self.law(self.place)

    def step(self, to: Callable[[float], float]) -> Callable[[], None]:
        def descend() -> None:
            target = to(self.place)
            with torch.no_grad():
                self.parameters[0].fill_(target)
                self.parameters[1][0] = -target

        return descend

    def shorten(self, ceiling: float, descend: Callable[[float], float] = lambda x: 0.8 * x) -> Cut:
        start = self.law(float(self.before[0][0]))
        return shorten_update(self.parameters, self.before, self.kl, start, ceiling, self.step(descend))


def test_below_the_ceiling_an_update_stays_whole() -> None:
    point = Point(0.1, 0.9)
    assert point.shorten(1.0) == Cut(1.0, pytest.approx(0.01), pytest.approx(0.81), pytest.approx(0.81))
    assert point.place == pytest.approx(0.9)
    assert point.measured == 1


@pytest.mark.parametrize("end", [1.01, 2.0, 8.0])
def test_an_update_that_would_cross_is_kept_as_far_as_it_may_go(end: float) -> None:
    point = Point(0.1, end)
    cut = point.shorten(1.0)
    assert cut.kl_after <= 1.0
    assert cut.kl_after == pytest.approx(point.place**2)
    assert cut.kl_whole == pytest.approx(end**2)
    assert point.place == pytest.approx(0.1 + cut.factor * (end - 0.1))
    # the longest part that may be kept, to within what six halvings can tell
    longest = 0.9 / (end - 0.1)
    assert longest - cut.factor < 2**-5
    assert not cut.descended


def test_nothing_is_kept_where_even_a_little_crosses() -> None:
    point = Point(0.999, 1000.0)
    cut = point.shorten(1.0)
    assert cut.kl_after <= 1.0
    assert point.place == pytest.approx(0.999)
    assert cut.factor == 0.0


def test_started_above_an_update_that_lowers_the_kl_stays_whole() -> None:
    point = Point(3.0, 2.0)
    assert point.shorten(1.0).factor == 1.0
    assert point.place == 2.0


def test_started_above_an_update_that_raises_it_gives_way_to_the_kl_itself() -> None:
    point = Point(3.0, 4.0)
    cut = point.shorten(1.0)
    assert cut == Cut(0.0, pytest.approx(9.0), pytest.approx(2.4**2), pytest.approx(16.0), descended=True)
    assert point.place == pytest.approx(2.4)


def test_a_descent_that_overshoots_is_shortened() -> None:
    point = Point(3.0, 4.0)
    cut = point.shorten(1.0, lambda x: -5 * x)
    assert cut.descended
    assert cut.kl_after < 9.0
    assert cut.kl_after == pytest.approx(point.place**2)


def test_where_nothing_lowers_the_kl_the_update_is_undone() -> None:
    point = Point(3.0, 4.0)
    cut = point.shorten(1.0, lambda x: 2 * x)
    assert cut == Cut(0.0, pytest.approx(9.0), pytest.approx(9.0), pytest.approx(16.0))
    assert point.place == pytest.approx(3.0)


@pytest.mark.parametrize("start", [0.5, 3.0])
def test_a_kl_that_cannot_be_measured_is_no_reason_to_go_there(start: float) -> None:
    point = Point(start, 5.0, lambda x: x * x if abs(x) <= 3 else math.nan)
    cut = point.shorten(1.0)
    assert math.isfinite(cut.kl_after)
    assert abs(point.place) <= max(1.0, start)


@given(
    start=st.floats(-3, 3),
    end=st.floats(-6, 6),
    ceiling=st.floats(0.01, 4),
    waves=st.floats(0, 2),
    shrink=st.floats(-3, 3),
)
@settings(max_examples=150, deadline=None)
def test_it_ends_and_never_leaves_the_kl_above_both_ceiling_and_start(
    start: float, end: float, ceiling: float, waves: float, shrink: float
) -> None:
    def bumpy(x: float) -> float:
        return x * x * (1.5 + math.sin(9 * waves * x))

    point = Point(start, end, bumpy)
    cut = point.shorten(ceiling, lambda x: shrink * x)
    allowed = max(ceiling, bumpy(float(point.before[0][0])))
    assert bumpy(point.place) <= allowed * (1 + 1e-5)
    assert cut.kl_after == pytest.approx(bumpy(point.place), rel=1e-4, abs=1e-6)
    assert 0.0 <= cut.factor <= 1.0
    assert point.measured < 20


def test_the_forecast_learns_how_much_higher_the_next_rollout_reads() -> None:
    forecast = KLForecast()
    assert forecast.ratio == 1.0
    for _ in range(60):
        forecast.predicted = 0.1
        forecast.observe(0.13)
    assert forecast.ratio == pytest.approx(1.3, rel=0.02)


def test_one_wild_reading_does_not_spoil_the_forecast() -> None:
    for predicted, measured in ((0.01, 100.0), (1.0, 1e-6), (0.0, 1.0), (None, 1.0), (0.1, math.nan)):
        forecast = KLForecast()
        forecast.predicted = predicted
        forecast.observe(measured)
        assert 0.5 < forecast.ratio < 2.0


def test_the_forecast_goes_on_from_its_state() -> None:
    forecast, other = KLForecast(), KLForecast()
    forecast.predicted = 0.1
    forecast.observe(0.12)
    other.load_state_dict(forecast.state_dict())
    for one in (forecast, other):
        one.observe(0.2)
    assert other.state_dict() == forecast.state_dict()
