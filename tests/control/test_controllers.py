"""Bounds, alerts, saved state and rollback, for every controller and for plugins."""

from __future__ import annotations

import inspect
import json
import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_kl.control import (
    CONTROLLER_PROVIDED,
    CONTROLLERS,
    FixedKL,
    Guard,
    Law,
    ThresholdKL,
    ZieglerKL,
    build_controller,
)
from rlhf_kl.errors import InputError
from rlhf_kl.events import CoefNotFinite, ControllerState, ControllerTooSlow, KLNotFinite, worded

ALL = sorted(CONTROLLERS)


def built(kind, **options):
    return build_controller(kind, options, target=0.1, coef=0.1, total_episodes=640, batch_size=64)


kl_values = st.one_of(
    st.floats(min_value=0.0, max_value=1.0),
    st.floats(min_value=-1e-6, max_value=1e300),
    st.sampled_from([None, math.nan, math.inf, -math.inf]),
)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(kl_values, kl_values, kl_values), max_size=40))
def test_coef_never_leaves_its_bounds(kind, steps):
    control = built(kind)
    for kl, after, uncut in steps:
        before = control.beta
        move = None if kl is None or after is None or uncut is None else (kl, after, uncut)
        events = control.step(kl, 64, move)
        assert 0.0 < control.min_coef <= control.beta <= control.max_coef
        assert control.law.coef == control.beta
        if kl is None or not math.isfinite(kl):
            assert control.beta == before
            assert [type(event) for event in events] == [KLNotFinite]
        else:
            assert not events


@pytest.mark.parametrize("kind", ALL)
def test_saved_state_has_the_same_future(kind):
    past = [0.0, 0.02, 0.2, math.nan, 0.5, 0.1, 0.07]
    future = [0.08, 0.2, 0.03, 0.0, 0.4, 0.11, 0.1]  # begins with a step that no limit of a rate cuts
    first, second = built(kind), built(kind)
    for step, kl in enumerate(past):
        first.step(kl, 64, (kl, 0.9 * kl, kl) if step % 2 else None)  # some updates are observed, others not
    first.law.observe_update(0.07, 0.08, 0.1)  # not used yet: belongs to the state as well
    second.restore(json.loads(json.dumps(first.save(), allow_nan=False)))
    for kl in future:
        assert second.beta == first.beta
        first.step(kl, 64)
        second.step(kl, 64)
    assert second.beta == first.beta


def test_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="ThresholdKL"):
        built("adaptive").restore(built("threshold").save())


class Scripted:
    """A plugin that is no subclass and has no state_dict: beta follows a given list."""

    def __init__(self, *coefs):
        self.coef, self.coming, self.recent = 0.1, list(coefs), deque(maxlen=3)

    def update(self, kl, episodes):
        self.recent.append(kl)
        self.coef = self.coming.pop(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -0.1])
def test_a_plugin_that_breaks_its_coef_is_put_back(bad):
    control = Guard(Scripted(0.2, bad, 0.3))
    assert not control.step(0.1, 64)
    assert isinstance(control.step(0.7, 64)[0], CoefNotFinite)
    assert control.beta == control.law.coef == 0.2
    assert 0.7 not in control.law.recent  # all of its state, not only beta


def test_a_coef_that_is_put_back_after_a_rollback_counts_it_once():
    control = Guard(Scripted(0.2, math.nan))
    control.step(0.1, 64)
    control.raise_beta(2.0)
    control.step(0.1, 64)
    assert (control.beta, control.law.coef) == (0.4, 0.2)


def test_state_that_cannot_be_saved_is_named_at_the_start():
    plugin = Scripted(0.2)
    plugin.lock = object()
    assert Guard(plugin).start_events(60, 64) == [ControllerState("lock")]
    assert not Guard(Scripted(0.2)).start_events(60, 64)


def test_a_subclass_needs_only_update():
    class Doubling(Law):
        def update(self, kl, episodes):
            self.coef *= 2.0

    control = build_controller(Doubling, {}, coef=0.2, target=0.1)
    assert not control.needs_update_kl
    control.step(0.1, 64, (0.1, 0.2, 0.2))
    assert control.beta == control.save()["law"]["coef"] == 0.4


class Watches:
    """Keeps what it is shown of an update; nobody may write its coef."""

    def __init__(self):
        self.seen, self.price = [], 0.2

    @property
    def coef(self):
        return self.price

    def observe_update(self, *kls):
        self.seen.append(kls)

    def update(self, kl, episodes):
        self.price *= 100.0


def test_a_law_is_shown_an_update_that_was_measured_and_may_keep_its_coef_to_itself():
    law = Watches()
    control = Guard(law)
    for move in (None, (0.1, math.nan, 0.2), (0.1, 0.2, 0.3)):
        assert not control.step(0.1, 64, move)
    assert law.seen == [(0.1, 0.2, 0.3)]
    assert (control.beta, law.coef) == (200.0, pytest.approx(200000.0))


def test_a_rollback_raises_a_schedule_for_good():
    """Linear from 0.1 to 0.3 over 640 episodes; doubled after the first of ten updates."""
    control, plain = built("schedule"), built("schedule")
    for law in (control, plain):
        law.step(0.1, 64)
    assert control.raise_beta(2.0)
    resumed = built("schedule")
    resumed.restore(json.loads(json.dumps(control.save())))
    for updates in range(2, 11):
        for law in (control, plain, resumed):
            law.step(0.1, 64)
        assert control.beta == resumed.beta == pytest.approx(2.0 * (0.1 + 0.02 * updates))
        assert plain.beta == pytest.approx(0.1 + 0.02 * updates)


def test_a_rollback_raises_within_the_bounds():
    control = built("adaptive")
    assert all(control.raise_beta(2.0) for _ in range(10))
    assert not control.raise_beta(2.0)
    assert control.beta == control.max_coef == pytest.approx(100.0)
    control.step(0.1, 64)
    assert control.beta <= control.max_coef


def test_beta_zero_is_for_constant_controllers():
    control = Guard(FixedKL(coef=0.0))
    assert not control.step(5.0, 64)
    assert control.beta == 0.0
    assert not control.adjusts
    assert not control.start_events(60, 64)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"min_coef": 2.0, "max_coef": 1.0}, "above"),
        ({"min_coef": 0.5}, "outside"),
        ({"max_coef": math.nan}, "max_coef"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        Guard(Scripted(), **options)


def test_an_object_without_update_or_beta_is_refused():
    with pytest.raises(ValueError, match="update"):
        Guard(object())
    with pytest.raises(ValueError, match="coef, kl_coef, beta, value"):
        Guard(Doubles("price"))


# ---- classes that say what beta is in another way


class Doubles:
    """Its beta is in an attribute of this name, and `update` returns `answer`."""

    def __init__(self, name, start=0.2, answer=None):
        self.name, self.answer = name, answer
        setattr(self, name, start)

    def update(self, kl):
        setattr(self, self.name, 2.0 * getattr(self, self.name))
        return self.answer


@pytest.mark.parametrize("name", ["coef", "kl_coef", "beta", "value"])
@pytest.mark.parametrize("answer", [None, True, "0.9", (0.9,), np.array([0.9, 0.8])])
def test_an_attribute_holds_beta_where_update_returns_no_number(name, answer):
    control = Guard(Doubles(name, answer=answer), max_coef=1.0)
    betas = [control.step(0.1, 64) or control.beta for _ in range(3)]
    assert betas == [0.4, 0.8, 1.0]
    assert getattr(control.law, name) == 1.0  # it goes on from the bound
    again = Guard(Doubles(name))
    again.restore(json.loads(json.dumps(control.save())))
    assert again.beta == getattr(again.law, name) == 1.0


@pytest.mark.parametrize("answer", [0.7, np.float32(0.7), np.array(0.7), 0.7 * torch.ones(())])
@pytest.mark.parametrize("name", ["coef", "price"])
def test_a_number_that_update_returns_is_beta(name, answer):
    control = Guard(Doubles(name, answer=answer), start=0.2)
    assert control.beta == 0.2
    assert not control.step(0.1, 64)
    assert control.beta == pytest.approx(0.7)
    assert isinstance(control.beta, float)
    assert control.raise_beta(2.0)
    control.step(0.1, 64)
    assert control.beta == pytest.approx(1.4)


def test_a_beta_that_only_update_tells_starts_as_the_run_says_and_is_put_back():
    class Private:
        def __init__(self, kl_coef, target_kl):
            self._price, self.goal = kl_coef, target_kl

        def update(self, kl):
            self._price *= math.nan if kl > 1.0 else 1.5 if kl > self.goal else 1 / 1.5
            return self._price

    control = build_controller(Private, {}, **RUN)
    assert (control.beta, control.bounds) == (0.3, (pytest.approx(3e-4), pytest.approx(300.0)))
    control.step(0.3, 64)
    assert isinstance(control.step(2.0, 64)[0], CoefNotFinite)
    control.step(0.1, 64)
    assert control.beta == pytest.approx(0.3)
    again = build_controller(Private, {"coef": 0.5, "target": 0.1}, **RUN)
    assert (again.beta, again.law.goal) == (0.5, 0.1)
    again.restore(json.loads(json.dumps(control.save())))
    again.step(0.1, 64)
    assert again.beta == pytest.approx(0.2)


def test_an_update_that_leaves_no_beta_ends_the_run():
    class Loses:
        coef = 0.1

        def update(self, kl, episodes):
            self.coef = None

    with pytest.raises(InputError, match=r"Loses\.update returned None"):
        Guard(Loses()).step(0.1, 64)


def test_attributes_with_the_names_of_optional_methods_are_left_alone():
    law = Scripted(0.2)
    law.scale, law.observe_rate, law.state_dict = 2.0, 0.5, None
    control = Guard(law)
    control.change_rate(0.5)
    assert not control.step(0.1, 64)
    assert (control.distance_kept(), control.beta, law.scale) == (1.0, 0.2, 2.0)


def test_a_law_is_told_what_the_run_knows():
    class Asks(Scripted):
        told = ()

        def observe_solved(self, coef, share):
            self.told += ((coef, share),)

        def observe_progress(self, rises):
            self.told += (rises,)

    control = Guard(Asks(0.2, 0.3))
    control.know_solved(0.4, 0.5)
    control.step(0.1, 64)
    control.step(0.1, 64, progress=False)
    assert control.law.told == ((0.4, 0.5), True, False)
    Guard(Scripted(0.2)).know_solved(0.4, 0.5)  # another need not have the methods


@pytest.mark.parametrize(
    ("kind", "options", "slow"),
    [
        ("ziegler", {"horizon": 10000}, True),
        ("ziegler", {"horizon": 320}, False),
        ("exponential", {}, True),
        ("exponential", {"gain": 2.0}, False),
        ("adaptive", {}, False),
        ("fixed", {}, False),
        ("schedule", {}, False),
        ("pid", {"rate": 0.001}, True),
    ],
)
def test_a_law_that_cannot_move_beta_in_this_run_is_named_at_the_start(kind, options, slow):
    assert [type(event) for event in built(kind, **options).start_events(60, 64)] == [ControllerTooSlow] * slow


@pytest.mark.parametrize(
    ("kind", "options", "low", "high"),
    [
        ("ziegler", {"horizon": 64}, 0.1 * 0.8**3, 0.1 * 1.2**3),
        ("threshold", {"high": 2.5}, 0.1 / 1.5**3, 0.1),  # twice the target is not high
    ],
)
def test_the_range_of_beta_is_where_the_largest_steps_lead(kind, options, low, high):
    assert built(kind, **options).beta_range(3, 64) == pytest.approx((low, high))
    for kl, end in ((0.0, low), (0.2, high)):  # of a target of 0.1
        control = built(kind, **options)
        for _ in range(3):
            control.step(kl, 64)
        assert control.beta == pytest.approx(end)


class Recorder:
    """A plugin that keeps its options."""

    def __init__(self, *, coef=0.2, max_coef=4.0, **options):
        self.coef, self.options = coef, options

    def update(self, kl, episodes):
        self.coef *= 10.0


class CountsEpisodes:
    def __init__(self, *, total_episodes, batch_size):
        self.coef, self.sizes = 0.1, (total_episodes, batch_size)

    def update(self, kl, episodes):
        """Nothing moves."""


RUN = {"target": 0.2, "coef": 0.3, "total_episodes": 640, "batch_size": 64}


def test_a_class_gets_the_values_that_it_takes():
    recorder = build_controller(Recorder, {"gain": 2}, **RUN).law
    assert recorder.coef == 0.3
    assert recorder.options == {"gain": 2, "target": 0.2, "total_episodes": 640, "batch_size": 64}
    assert build_controller(CountsEpisodes, {}, **RUN).law.sizes == (640, 64)
    provided = inspect.getfullargspec(build_controller).kwonlyargs
    assert {*provided} - {"where"} == {*CONTROLLER_PROVIDED} - {"min_coef", "max_coef"}


def test_written_options_win_and_unknown_values_are_left_out():
    assert build_controller(Recorder, {"coef": 0.7}, **RUN).beta == 0.7
    threshold = build_controller(ThresholdKL, {}).law
    assert (threshold.coef, threshold.target) == (0.1, 0.02)


@pytest.mark.parametrize(
    ("kind", "options", "started"),
    [
        (Recorder, {}, 4.0),
        (Recorder, {"max_coef": 6}, 6.0),
        (Recorder, {"max_coef": math.inf}, 9.0),
        ("threshold", {}, 9.0),
        ("threshold", {"max_coef": 1.0}, 1.0),
        ("threshold", {"max_coef": 20.0, "min_coef": 15.0}, 15.0),
        ("fixed", {}, 9.0),
    ],
)
def test_an_automatic_coef_is_moved_inside_the_bounds(kind, options, started):
    assert build_controller(kind, options, **RUN | {"coef": 9.0}).beta == started


def test_a_written_coef_outside_of_the_bounds_is_refused():
    for kind, options in (("threshold", {"max_coef": 4}), (Recorder, {})):
        with pytest.raises(ValueError, match=r"coef 9 is outside \[min_coef, max_coef\]"):
            build_controller(kind, {"coef": 9.0} | options, **RUN)


@pytest.mark.parametrize("kind", ["adaptive", "ziegler", "threshold", "exponential", "dual", "pid", CountsEpisodes])
@pytest.mark.parametrize("start", [0.002, 40.0])
def test_bounds_are_relative_to_the_start_unless_they_are_written(kind, start):
    """Scores a hundred times larger take a beta a hundred times larger."""
    start = 0.1 if kind is CountsEpisodes else start
    control = build_controller(kind, {}, **RUN | {"coef": start})
    assert (control.min_coef, control.max_coef) == pytest.approx((1e-3 * start, 1e3 * start))
    control = build_controller(kind, {"max_coef": 2 * start}, **RUN | {"coef": start})
    assert (control.min_coef, control.max_coef) == pytest.approx((1e-3 * start, 2 * start))


def test_an_automatic_coef_that_the_bounds_move_is_told_at_the_start():
    moved = build_controller("fixed", {"max_coef": 4.0}, **RUN | {"coef": 9.0}).start_events(60, 64)
    assert worded(moved)[0].startswith("coef-moved: auto found beta 9, ")
    assert build_controller("fixed", {"max_coef": 4.0, "coef": 3.0}, **RUN | {"coef": 9.0}).start_events(60, 64) == []


def test_names_and_synonyms():
    with pytest.raises(ValueError, match=r"'adaptve'; did you mean adaptive"):
        build_controller("adaptve", {})
    assert isinstance(build_controller("proportional", {"horizon": 9}).law, ZieglerKL)
    assert isinstance(build_controller("static", {}).law, FixedKL)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf])
def test_a_share_of_the_distance_is_from_0_to_1(share: float) -> None:
    class Scales:
        coef = 0.1

        def update(self, kl: float, episodes: int) -> None: ...

        def scale(self) -> float:
            return share

    with pytest.raises(InputError, match=r"Scales\.scale returned "):
        Guard(Scales()).distance_kept()
