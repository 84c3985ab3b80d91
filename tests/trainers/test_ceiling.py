"""The ceiling on an analytic KL (that of a point at `p` is |p|^2), and in the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlhf_kl.kl_controllers import GuardedController
from rlhf_kl.trainers.ceiling import Ceiling, CeilingResult, KLForecast, shorten_update
from rlhf_kl.trainers.metrics import update_row
from rlhf_kl.trainers.ppo import PPOTrainer

Make = Callable[..., Any]


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

    def shorten(self, ceiling: float, descend: Callable[[float], float] = lambda x: 0.8 * x) -> CeilingResult:
        start = self.law(float(self.before[0][0]))
        return shorten_update(self.parameters, self.before, self.kl, start, ceiling, self.step(descend))


def test_below_the_ceiling_an_update_stays_whole() -> None:
    point = Point(0.1, 0.9)
    assert point.shorten(1.0) == CeilingResult(1.0, pytest.approx(0.01), pytest.approx(0.81), pytest.approx(0.81))
    assert point.place == pytest.approx(0.9)
    assert point.measured == 1


@pytest.mark.parametrize("end", [1.01, 2.0, 8.0])
def test_an_update_that_would_cross_is_kept_as_far_as_it_may_go(end: float) -> None:
    point = Point(0.1, end)
    result = point.shorten(1.0)
    assert result.kl_after <= 1.0
    assert result.kl_after == pytest.approx(point.place**2)
    assert result.kl_uncut == pytest.approx(end**2)
    assert point.place == pytest.approx(0.1 + result.factor * (end - 0.1))
    # the longest part that may be kept, to within what six halvings can tell
    longest = 0.9 / (end - 0.1)
    assert longest - result.factor < 2**-5
    assert not result.descended


def test_nothing_is_kept_where_even_a_little_crosses() -> None:
    point = Point(0.999, 1000.0)
    result = point.shorten(1.0)
    assert result.kl_after <= 1.0
    assert point.place == pytest.approx(0.999)
    assert result.factor == 0.0


def test_started_above_an_update_that_lowers_the_kl_stays_whole() -> None:
    point = Point(3.0, 2.0)
    assert point.shorten(1.0).factor == 1.0
    assert point.place == 2.0


def test_started_above_an_update_that_raises_it_gives_way_to_the_kl_itself() -> None:
    point = Point(3.0, 4.0)
    result = point.shorten(1.0)
    assert result == CeilingResult(0.0, pytest.approx(9.0), pytest.approx(2.4**2), pytest.approx(16.0), descended=True)
    assert point.place == pytest.approx(2.4)


def test_a_descent_that_overshoots_is_shortened() -> None:
    point = Point(3.0, 4.0)
    result = point.shorten(1.0, lambda x: -5 * x)
    assert result.descended
    assert result.kl_after < 9.0
    assert result.kl_after == pytest.approx(point.place**2)


def test_where_nothing_lowers_the_kl_the_update_is_undone() -> None:
    point = Point(3.0, 4.0)
    result = point.shorten(1.0, lambda x: 2 * x)
    assert result == CeilingResult(0.0, pytest.approx(9.0), pytest.approx(9.0), pytest.approx(16.0))
    assert point.place == pytest.approx(3.0)


@pytest.mark.parametrize("start", [0.5, 3.0])
def test_a_kl_that_cannot_be_measured_is_no_reason_to_go_there(start: float) -> None:
    point = Point(start, 5.0, lambda x: x * x if abs(x) <= 3 else math.nan)
    result = point.shorten(1.0)
    assert math.isfinite(result.kl_after)
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
    result = point.shorten(ceiling, lambda x: shrink * x)
    allowed = max(ceiling, bumpy(float(point.before[0][0])))
    assert bumpy(point.place) <= allowed * (1 + 1e-5)
    assert result.kl_after == pytest.approx(bumpy(point.place), rel=1e-4, abs=1e-6)
    assert 0.0 <= result.factor <= 1.0
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


@pytest.mark.parametrize("measures", [True, False])
def test_without_a_limit_the_kl_is_measured_for_who_uses_it(measures: bool) -> None:
    point = Point(0.1, 0.9)
    ceiling = Ceiling(point.parameters, lambda _: point.kl(), lambda _: None, limit=None, measures=measures)
    assert ceiling.snapshot() == []
    result = ceiling.hold(None, [], 0.5)  # type: ignore[arg-type]
    assert (result.factor, result.kl_before) == (1.0, 0.5)
    assert result.kl_after == pytest.approx(0.81 if measures else math.nan, nan_ok=True)
    assert point.measured == measures
    assert point.place == pytest.approx(0.9)


def test_a_ceiling_goes_on_from_its_state() -> None:
    """A rollout that read twice the forecast halves the way to the limit, by a fifth at a time."""
    kept = []
    for resumed in (False, True):
        point = Point(0.0, 0.5)
        first = Ceiling(point.parameters, lambda _, point=point: point.kl(), lambda _: None, limit=1.0, measures=False)
        before = [torch.tensor([0.0]), torch.tensor([0.0, 0.0])]
        first.hold(None, before, 0.0)  # type: ignore[arg-type]
        other = Ceiling(point.parameters, first.kl_now, first.descend, limit=1.0, measures=False)
        other.load_state_dict(first.state_dict())
        with torch.no_grad():
            for p in point.parameters:
                p.mul_(8)
        ceiling = other if resumed else first
        kept.append(ceiling.hold(None, before, 0.5))  # type: ignore[arg-type]
        assert ceiling.forecast.ratio == pytest.approx(1.2)
    assert kept[0] == kept[1]
    assert kept[0].kl_after <= 1.0 / 1.2


# ---- in the trainer ----


def moved_far(trainer: PPOTrainer, updates: int) -> list[dict[str, Any]]:
    return [update_row(trainer.update(step), trainer.config) for step in range(1, updates + 1)]


def test_without_a_ceiling_this_run_goes_far(make_trainer: Make) -> None:
    """What the next two tests hold back."""
    rows = moved_far(make_trainer(ppo={"learning_rate": 1e-2}), 6)
    assert rows[-1]["kl/token"] > 0.2
    assert rows[-1]["kl/sequence"] > 1.0
    assert {row["kl/backtrack_factor"] for row in rows} == {1.0}
    assert rows[0]["kl/ceiling"] is None


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_ceiling_shortens_the_updates_that_would_cross_it(make_trainer: Make, recorder: Make, unit: str) -> None:
    ceiling = 0.1 if unit == "token" else 0.5
    law = recorder(0.01)
    trainer = make_trainer(
        controller=GuardedController(law, max_coef=0.02),
        ppo={"learning_rate": 1e-2},
        kl={"unit": unit, "target": ceiling / 2, "ceiling": {"value": ceiling, "action": "backtrack"}},
    )
    rows = moved_far(trainer, 6)
    assert max(row[f"kl/{unit}"] for row in rows) < 1.6 * ceiling  # the old states read a little low
    assert min(row["kl/backtrack_factor"] for row in rows) < 1.0
    for row, (_, after, whole) in zip(rows, law.observed, strict=True):
        assert (whole > after) == (row["kl/backtrack_factor"] < 1)
    assert all(row["kl/after_update"] <= 1.001 * max(ceiling * 2, row[f"kl/{unit}"]) for row in rows)
    assert rows[0]["kl/ceiling"] == ceiling


def test_from_above_the_ceiling_it_comes_back(make_trainer: Make, new_model: Make, recorder: Make) -> None:
    """A policy that starts far from its reference, with a reward that pulls nowhere near."""
    trainer = make_trainer(
        policy=new_model(seed=3, spread=0.15),
        reference=new_model(seed=3, spread=0.1),
        controller=GuardedController(recorder(1e-3), max_coef=1e-3),
        kl={"target": 0.005, "ceiling": {"value": 0.01, "action": "backtrack"}},
        ppo={"learning_rate": 1e-3},
    )
    kls = [row["kl/token"] for row in moved_far(trainer, 10)]
    assert kls[0] > 0.02
    assert kls[-1] < 0.5 * kls[0]
