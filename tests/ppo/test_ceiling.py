"""The ceiling on an analytic KL (that of a point at `p` is |p|^2), and in the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlhf_kl.control import Guard
from rlhf_kl.control.ceiling import Ceiling, CeilingResult, KLForecast
from rlhf_kl.control.way import Way
from rlhf_kl.ops.masked import Mean
from tests.made import Make, Recorder, row_of


class Point:
    """A policy of two tensors whose KL is known; its reference is at 0."""

    def __init__(
        self, start: float, end: float, kl: Callable[[float], float] = lambda x: x * x, stderr: float = 0.0
    ) -> None:
        self.parameters = [nn.Parameter(torch.tensor([end])), nn.Parameter(torch.tensor([-end, 0.0]))]
        self.before = [torch.tensor([start]), torch.tensor([-start, 0.0])]
        self.law, self.stderr, self.measured = kl, stderr, 0
        self.wholes: list[bool] = []

    @property
    def place(self) -> float:
        first, second = (float(p.detach()[0]) for p in self.parameters)
        assert second == pytest.approx(-first)  # all tensors move together
        return first

    def read(self, whole: bool) -> Mean:
        self.measured += 1
        self.wholes.append(whole)
        return Mean(self.law(self.place), self.stderr)

    def ceiling(self, limit: float | None, *, measures: bool = False, reference: bool = True) -> Ceiling:
        way = Way(self.parameters, lambda: [torch.zeros(1), torch.zeros(2)]) if reference else None
        return Ceiling(self.parameters, way, target=(limit or 1.5) / 1.5, limit=limit, measures=measures)

    def shorten(self, limit: float, *, reference: bool = True) -> CeilingResult:
        start = Mean(self.law(float(self.before[0][0])), self.stderr)
        return self.ceiling(limit, reference=reference).hold(self.read, self.before, start)


def test_below_the_ceiling_an_update_stays_whole() -> None:
    point = Point(0.1, 0.9)
    assert point.shorten(1.0) == CeilingResult(1.0, pytest.approx(0.01), pytest.approx(0.81), pytest.approx(0.81))
    assert point.place == pytest.approx(0.9)
    assert point.measured == 1


@pytest.mark.parametrize("stderr", [0.0, 0.2])
@pytest.mark.parametrize("end", [1.01, 2.0, 8.0])
@pytest.mark.parametrize(("reference", "origin"), [(True, 0.0), (False, 0.1)])
def test_an_update_that_would_cross_goes_back_until_it_is_below(
    reference: bool, origin: float, end: float, stderr: float
) -> None:
    """On the line to the reference, or to where the update began."""
    point = Point(0.1, end, stderr=stderr)
    result = point.shorten(1.0, reference=reference)
    assert 0.93 < result.kl_after <= 1.0
    assert result.kl_after == pytest.approx(point.place**2)
    assert result.kl_uncut == pytest.approx(end**2)
    assert point.place == pytest.approx(origin + result.factor * (end - origin))
    assert result.scale == (pytest.approx(point.place / end) if reference else 1.0)


def test_the_forecast_learns_from_what_was_kept_and_scaled() -> None:
    point = Point(0.1, 2.0)
    ceiling = point.ceiling(1.0)
    move = ceiling.hold(point.read, point.before, Mean(0.01, 0.0))
    assert ceiling.forecast.made == (0.01, move.kl_after)
    assert move.kl_after < move.kl_uncut
    place = point.place
    scaled = ceiling.scale(point.read, move, 0.5)
    assert point.place == pytest.approx(place / 2)
    assert scaled.kl_after == pytest.approx(point.place**2)
    assert ceiling.forecast.made == (0.01, scaled.kl_after)


@pytest.mark.parametrize("power", [0.7, 1.5, 2.0, 2.8, 3.6])
def test_where_the_kl_falls_with_another_power_it_is_measured_and_lands_as_near(power: float) -> None:
    """As of an adapter whose two factors are scaled; measured powers are 2.7 to 3.6."""
    point = Point(0.1, 1.4, lambda x: abs(x) ** power)
    ceiling = point.ceiling(1.0)
    move = ceiling.hold(point.read, [], Mean(0.1**power, 0.0))
    assert 0.93 <= move.kl_after <= 1.0
    assert move.kl_after == pytest.approx(point.law(point.place))
    assert move.scale == pytest.approx(point.place / 1.4)
    scaled = ceiling.scale(point.read, move, 0.7)
    assert scaled.kl_after == pytest.approx(0.49 * move.kl_after, rel=0.03)  # by the square, as a controller expects
    assert scaled.kl_after == pytest.approx(point.law(point.place))
    assert scaled.scale == pytest.approx(point.place / 1.4)
    assert ceiling.forecast.made == (pytest.approx(0.1**power), scaled.kl_after)


@given(power=st.floats(0.3, 9.0), steep=st.floats(3.0, 100.0), middle=st.floats(0.1, 0.9), size=st.floats(0.2, 50.0))
@settings(max_examples=200, deadline=None)
def test_a_policy_that_blew_up_is_not_thrown_away(power: float, steep: float, middle: float, size: float) -> None:
    """Its KL may rise within a small part of the way. The search ends below the limit, never beyond the end."""
    farthest, tries = 0.0, list[tuple[float, float]]()

    def law(x: float) -> float:
        nonlocal farthest
        farthest = max(farthest, x)
        kl = 0.3 * x**power + size / (1.0 + math.exp(-steep * (x - middle))) - size / (1.0 + math.exp(steep * middle))
        tries.append((x, kl))
        return kl

    point = Point(0.0, 1.0, law)
    result = point.shorten(0.15)
    assert farthest <= 1.0
    assert result.kl_after == pytest.approx(law(point.place), rel=1e-3, abs=1e-6)
    assert result.kl_after <= 0.15
    best = max((x for x, kl in tries if kl <= 0.14), default=0.0)
    assert point.place >= 0.999 * best


@pytest.mark.parametrize("half", [0.08, 0.10, 0.13])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.95])
def test_a_controllers_share_is_of_the_kl_at_all_states(half: float, share: float) -> None:
    """Half of the prompts may say another KL (0.1 at all); no policy goes beyond what was trained."""
    point = Point(0.0, math.sqrt(0.1))
    move = CeilingResult(1.0, 0.05, half, half)
    scaled = point.ceiling(None).scale(point.read, move, share)
    assert scaled.scale <= 1.0
    assert scaled.kl_after == pytest.approx(0.1 * share**2, rel=0.04)
    assert scaled.kl_after == pytest.approx(point.place**2)


def test_a_share_of_nothing_is_the_reference() -> None:
    point = Point(0.0, 0.5)
    scaled = point.ceiling(None).scale(point.read, CeilingResult(1.0, 0.1, 0.25, 0.25), 0.0)
    assert (scaled.kl_after, scaled.scale, point.place) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("end", "near"), [(0.86, False), (0.88, True), (0.99, True), (1.01, True)])
def test_near_the_limit_all_states_are_read(end: float, near: bool) -> None:
    """From 3 standard errors below it on (0.872 squared), and in the line search."""
    point = Point(0.0, end, stderr=0.08)
    point.shorten(1.0)
    assert point.wholes[:2] == [False, True][: 1 + near]
    assert all(point.wholes[1:])


@pytest.mark.parametrize("start", [0.5, 2.0])  # below and above the limit
def test_weights_that_are_no_numbers_are_undone(start: float) -> None:
    weight = nn.Parameter(torch.tensor([math.nan]))
    kl = lambda *_: Mean(float(weight.detach()) ** 2, 0.0)  # noqa: E731
    ceiling = Ceiling([weight], None, target=0.7, limit=1.0, measures=False)
    result = ceiling.hold(kl, [torch.tensor([start])], Mean(start**2, 0.0))
    assert (result.factor, result.kl_after, weight.item()) == (0.0, start**2, start)


def test_started_above_an_update_that_ends_below_stays_whole() -> None:
    point = Point(3.0, 0.5)
    assert point.shorten(1.0).factor == 1.0
    assert point.place == 0.5


@pytest.mark.parametrize("end", [2.0, 4.0, -2.0])
def test_started_above_the_policy_goes_back_towards_its_reference_until_it_is_below(end: float) -> None:
    """However far above it stands."""
    point = Point(3.0, end)
    result = point.shorten(1.0)
    assert 0.9 < result.kl_after <= 1.0
    assert result.kl_after == pytest.approx(point.place**2)
    assert result.factor == result.scale == pytest.approx(point.place / end)


def test_a_forecast_that_sees_no_relief_does_not_send_the_policy_to_its_reference() -> None:
    """Where the KL of rollouts follows that of old states little (gain 0), the way itself still scales it."""
    point = Point(1.2, 1.2)
    ceiling = point.ceiling(1.0)
    ceiling.forecast.square = 1e6
    result = ceiling.hold(point.read, point.before, Mean(1.44, 0.0))
    assert ceiling.forecast.gain < 1e-6
    assert result.kl_after == pytest.approx(0.97, abs=0.01)


def test_a_kl_that_is_no_number_on_the_way_sends_the_policy_to_its_reference() -> None:
    point = Point(0.1, 4.0, lambda x: x * x if x > 2.0 or x == 0.0 else math.nan)
    ceiling = point.ceiling(1.0)
    result = ceiling.hold(point.read, [], Mean(0.01, 0.0))
    assert (result.factor, result.scale, result.kl_after, point.place) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("end", "kept"), [(2.0, 2.0), (4.0, 3.0)])
def test_where_no_reference_lies_on_a_line_the_lower_of_both_ends_is_kept(end: float, kept: float) -> None:
    point = Point(3.0, end)
    result = point.shorten(1.0, reference=False)
    assert point.place == pytest.approx(kept)
    assert result.kl_after == pytest.approx(kept**2)
    assert result.factor == (1.0 if kept == end else 0.0)


@given(start=st.floats(-3, 3), end=st.floats(-6, 6), limit=st.floats(0.01, 4), waves=st.floats(0, 2))
@settings(max_examples=150, deadline=None)
def test_it_ends_and_never_leaves_the_kl_above_the_ceiling(
    start: float, end: float, limit: float, waves: float
) -> None:
    def bumpy(x: float) -> float:
        return x * x * (1.5 + math.sin(9 * waves * x))

    point = Point(start, end, bumpy)
    result = point.shorten(limit)
    assert bumpy(point.place) <= limit * (1 + 1e-5)
    assert result.kl_after == pytest.approx(bumpy(point.place), rel=1e-4, abs=1e-6)
    assert 0.0 <= result.factor <= 1.0
    assert point.measured < 20


def test_the_forecast_learns_how_much_more_the_next_rollout_reads() -> None:
    """States of the new policy lie further away: a change by 0.05 at the old states is one by 0.08 at its own."""
    forecast, kl = KLForecast(0.15), 0.02
    assert forecast(0.1, 0.14) == pytest.approx(0.14)
    for change in [0.05, -0.05] * 30:
        forecast.observe(kl)
        forecast.made = (kl, kl + change)
        kl += 1.6 * change
    assert forecast.gain == pytest.approx(1.6, rel=0.02)
    assert forecast(0.1, 0.12) == pytest.approx(0.1 + 1.6 * 0.02, rel=0.02)
    assert forecast(0.1, 0.1) == 0.1  # a policy that did not move measures what it measured
    assert forecast(0.1, 0.05) == 0.05


def test_a_ceiling_goes_on_from_its_state() -> None:
    """A rollout that read three times the change raises the gain: less of the next update is kept."""
    kept = []
    for state in ("same", "loaded", "none"):
        point = Point(0.0, 0.5)
        first = point.ceiling(1.0)
        before = [torch.tensor([0.0]), torch.tensor([0.0, 0.0])]
        first.hold(point.read, before, Mean(0.0, 0.0))
        other = point.ceiling(1.0)
        if state == "loaded":
            other.forecast.load_state_dict(first.forecast.state_dict())
        with torch.no_grad():
            for p in point.parameters:
                p.mul_(8)
        ceiling = first if state == "same" else other
        kept.append(ceiling.hold(point.read, before, Mean(0.75, 0.0)))
        assert (2.0 < ceiling.forecast.gain < 3.0) == (state != "none")
    assert kept[0] == kept[1]
    assert kept[0].kl_after < kept[2].kl_after / 2


@pytest.mark.parametrize("measures", [True, False])
def test_without_a_limit_the_kl_is_measured_for_who_uses_it(measures: bool) -> None:
    point = Point(0.1, 0.9)
    ceiling = point.ceiling(None, measures=measures)
    assert ceiling.snapshot() == []
    result = ceiling.hold(point.read, [], Mean(0.5, 0.0))
    assert (result.factor, result.kl_before) == (1.0, 0.5)
    assert result.kl_after == pytest.approx(0.81 if measures else math.nan, nan_ok=True)
    assert point.measured == measures
    assert point.place == pytest.approx(0.9)


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_ceiling_shortens_the_updates_that_would_cross_it(make_trainer: Make, unit: str) -> None:
    ceiling = 0.1 if unit == "token" else 0.5
    law = Recorder(0.01)
    trainer = make_trainer(
        controller=Guard(law, max_coef=0.02),
        ppo={"learning_rate": 1e-2},
        kl={"unit": unit, "target": ceiling / 2, "ceiling": {"value": ceiling, "action": "backtrack"}},
    )
    rows = [row_of(trainer, step) for step in range(1, 7)]
    assert max(row[f"kl/{unit}"] for row in rows) < 1.3 * ceiling  # the old states read a little low
    assert min(row["kl/backtrack_factor"] for row in rows) < 1.0
    for row, (_, after, whole) in zip(rows, law.observed, strict=True):
        assert (whole > after) == (row["kl/backtrack_factor"] < 1)
    assert all(row["kl/after_update"] <= ceiling for row in rows)
    assert rows[0]["kl/ceiling"] == ceiling


def test_from_above_the_ceiling_it_comes_back_at_once(make_trainer: Make, new_model: Make) -> None:
    """A policy that starts far from its reference, with a reward that pulls nowhere near."""
    trainer = make_trainer(
        policy=new_model(seed=3, spread=0.15),
        reference=new_model(seed=3, spread=0.1),
        began_there=True,  # and was moved since
        controller=Guard(Recorder(1e-3), max_coef=1e-3),
        kl={"target": 0.005, "ceiling": {"value": 0.01, "action": "backtrack"}},
        ppo={"learning_rate": 1e-3},
    )
    kls = [row_of(trainer, step)["kl/token"] for step in range(1, 11)]
    assert kls[0] > 0.015
    assert max(kls[1:]) < 0.012
