"""What holds for every controller and every plugin, whatever it is fed."""

import json
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_kl.kl_controllers import (
    CONTROLLERS,
    FixedKL,
    KLControl,
    KLController,
    ThresholdKL,
    build_controller,
)

ALL = sorted(CONTROLLERS)
ADJUSTING = [kind for kind in ALL if CONTROLLERS[kind].adjusts]
CONTEXT = {"target": 0.1, "coef": 0.1, "total_episodes": 640, "batch_size": 64}


def control_of(kind):
    return KLControl(build_controller(CONTROLLERS[kind], {}, **CONTEXT))


kl_values = st.one_of(
    st.floats(min_value=0.0, max_value=1.0),
    st.floats(min_value=-1e-6, max_value=1e300),
    st.sampled_from([None, math.nan, math.inf, -math.inf]),
)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(kl_values, kl_values, kl_values), max_size=40))
def test_coef_never_leaves_its_bounds(kind, steps):
    control = control_of(kind)
    for kl, after, whole in steps:
        before = control.coef
        if kl is not None and after is not None and whole is not None:
            control.observe_update(kl, after, whole)
        alerts = control.update(kl, 64)
        assert 0.0 < control.min_coef <= control.coef <= control.max_coef
        assert control.controller.coef == control.coef
        if kl is None or not math.isfinite(kl):
            assert control.coef == before
            assert [alert.split(":")[0] for alert in alerts] == ["kl-not-finite"]
        else:
            assert alerts == []


@pytest.mark.parametrize("kind", ADJUSTING)
def test_a_lasting_error_moves_beta_the_right_way(kind):
    high, low = control_of(kind), control_of(kind)
    for _ in range(12):
        high.update(1.0, 64)
        low.update(0.001, 64)
    assert high.coef > 0.1 > low.coef


@pytest.mark.parametrize("kind", ALL)
def test_saved_state_has_the_same_future(kind):
    past, future = [0.0, 0.02, 0.2, math.nan, 0.5, 0.1, 0.07], [0.2, 0.03, 0.0, 0.4, 0.11, 0.1]
    first, second = control_of(kind), control_of(kind)
    for step, kl in enumerate(past):
        if step % 2:  # heard of some updates only
            first.observe_update(kl, 0.9 * kl, kl)
        first.update(kl, 64)
    first.observe_update(0.07, 0.08, 0.1)  # told, not yet used: belongs to the state as well
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    for kl in future:
        assert second.coef == first.coef
        first.update(kl, 64)
        second.update(kl, 64)
    assert second.coef == first.coef


def test_a_state_dict_is_a_copy():
    control = control_of("adaptive")
    control.update(0.1, 64)
    state = control.state_dict()
    text = json.dumps(state)
    for kl in (0.2, 0.3, 0.4):
        control.update(kl, 64)
    assert json.dumps(state) == text


def test_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="ThresholdKL"):
        control_of("adaptive").load_state_dict(control_of("threshold").state_dict())


@pytest.mark.parametrize("kind", ALL)
def test_the_run_starts_from_the_coef_given(kind):
    assert control_of(kind).coef == 0.1


def test_context_fills_only_what_is_taken_and_not_written():
    law = build_controller(ThresholdKL, {"target": 0.05}, target=0.1, coef=0.3, total_episodes=9, min_coef=None)
    assert (law.target, law.coef, law.min_coef) == (0.05, 0.3, 0.01)


class Scripted:
    """A plugin that is no subclass and has no state_dict: sets beta to what it is told to."""

    def __init__(self, *coefs):
        self.coef, self.coming, self.recent = 0.1, list(coefs), deque(maxlen=3)

    def update(self, kl, episodes):
        self.recent.append(kl)
        self.coef = self.coming.pop(0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -0.1])
def test_a_plugin_that_breaks_its_coef_is_put_back(bad):
    control = KLControl(Scripted(0.2, bad, 0.3))
    assert control.update(0.1, 64) == []
    [alert] = control.update(0.7, 64)
    assert alert.startswith("coef-not-finite: ")
    assert control.coef == control.controller.coef == 0.2
    assert 0.7 not in control.controller.recent  # all of its state, not only beta


def test_a_plugin_that_overflows_is_put_back():
    class Explosive:
        coef = 0.1

        def update(self, kl, episodes):
            self.coef *= math.exp(kl * episodes)

    control = KLControl(Explosive())
    [alert] = control.update(1e6, 64)
    assert "OverflowError" in alert
    assert control.coef == control.controller.coef == 0.1


def test_bounds_given_to_the_control_hold_for_a_plugin():
    control = KLControl(Scripted(5.0, 1e-9), min_coef=0.01, max_coef=1.0)
    control.update(0.1, 64)
    assert (control.coef, control.controller.coef, control.at_bound) == (1.0, 1.0, True)
    control.update(0.1, 64)
    assert (control.coef, control.at_bound) == (0.01, True)


def test_a_plugin_may_compute_its_coef():
    class Computed:
        def __init__(self):
            self.times = 1

        @property
        def coef(self):
            return 0.1 * self.times

        def update(self, kl, episodes):
            self.times += 30

    control = KLControl(Computed(), max_coef=1.0)
    control.update(0.1, 64)
    assert control.coef == 1.0
    assert control.controller.times == 31


def test_state_of_a_plain_plugin_is_saved_and_restored():
    first, second = KLControl(Scripted(0.2, 0.3)), KLControl(Scripted())
    first.update(0.5, 64)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.controller.recent == deque([0.5], maxlen=3)
    second.update(0.1, 64)
    assert second.coef == 0.3


def test_what_cannot_be_saved_is_said_at_the_start():
    plugin = Scripted(0.2)
    plugin.lock = object()
    assert any("lock" in warning for warning in KLControl(plugin).start_warnings(60, 64))
    assert KLControl(Scripted(0.2)).start_warnings(60, 64) == []


def test_a_subclass_needs_only_update():
    class Doubling(KLController):
        def update(self, kl, episodes):
            self.coef *= 2.0

    control = KLControl(build_controller(Doubling, {}, coef=0.2, target=0.1))
    control.update(0.1, 64)
    assert control.coef == 0.4
    assert not control.listens
    control.observe_update(0.1, 0.2, 0.2)
    assert control.state_dict()["controller"]["coef"] == 0.4


def test_a_rollback_raises_a_constant_beta_too_and_for_good():
    control = KLControl(FixedKL(coef=0.1))
    control.raise_coef(2.0)
    control.update(5.0, 64)
    assert control.coef == 0.2
    resumed = KLControl(FixedKL(coef=0.1))
    resumed.load_state_dict(control.state_dict())
    resumed.update(5.0, 64)
    assert resumed.coef == 0.2


def test_a_rollback_raises_within_the_bounds():
    control = control_of("adaptive")
    for _ in range(20):
        control.raise_coef(2.0)
    assert control.coef == control.max_coef


def test_beta_zero_is_for_constant_controllers():
    control = KLControl(FixedKL(coef=0.0))
    assert control.update(5.0, 64) == []
    assert control.coef == 0.0
    assert not control.at_bound
    assert control.start_warnings(60, 64) == []


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
        KLControl(Scripted(), **options)


def test_what_is_no_controller_is_refused():
    with pytest.raises(ValueError, match="update"):
        KLControl(object())


@pytest.mark.parametrize(
    ("kind", "options", "slow"),
    [
        ("proportional", {"horizon": 10000}, True),
        ("proportional", {"horizon": 320}, False),
        ("exponential", {}, True),
        ("exponential", {"gain": 2.0}, False),
        ("adaptive", {}, False),
        ("fixed", {}, False),
        ("schedule", {}, False),
        ("pid", {"rate": 0.001}, True),
    ],
)
def test_a_law_that_cannot_move_beta_in_this_run_is_named_at_the_start(kind, options, slow):
    control = KLControl(build_controller(CONTROLLERS[kind], options, **CONTEXT))
    said = any(warning.startswith("controller-too-slow: ") for warning in control.start_warnings(60, 64))
    assert said == slow


def test_reach_of_a_plugin_is_unknown_but_bounded():
    assert KLControl(Scripted(), max_coef=2.0).reach(60, 64) == (0.0, 2.0)
