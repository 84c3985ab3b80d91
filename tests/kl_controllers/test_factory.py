"""Which values a controller is built with, and the bounds of beta."""

import inspect
import math

import pytest

from rlhf_kl.kl_controllers import CONTROLLERS, FixedKL, ThresholdKL, ZieglerKL, build_controller
from rlhf_kl.kl_controllers.factory import BOUNDS, CONTROLLER_PROVIDED
from rlhf_kl.monitors import worded


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


@pytest.mark.parametrize("kind", [*CONTROLLERS, "static"])
def test_every_built_in_starts_from_the_given_coef(kind):
    assert build_controller(kind, {}, **RUN).coef == 0.3


def test_a_class_gets_the_values_that_it_takes():
    recorder = build_controller(Recorder, {"gain": 2}, **RUN).controller
    assert (recorder.coef, recorder.options) == (
        0.3, {"gain": 2, "target": 0.2, "total_episodes": 640, "batch_size": 64},
    )  # fmt: skip
    assert build_controller(CountsEpisodes, {}, **RUN).controller.sizes == (640, 64)
    assert {
        p.name for p in inspect.signature(build_controller).parameters.values() if p.kind is p.KEYWORD_ONLY
    } == CONTROLLER_PROVIDED - BOUNDS | {"explain"}


def test_written_options_win_and_unknown_values_are_left_out():
    assert build_controller(Recorder, {"coef": 0.7}, **RUN).coef == 0.7
    assert build_controller(CountsEpisodes, {"total_episodes": 10}, **RUN).controller.sizes == (10, 64)
    threshold = build_controller(ThresholdKL, {}).controller
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
    assert build_controller(kind, options, **RUN | {"coef": 9.0}).coef == started


def test_a_written_coef_outside_of_the_bounds_is_refused():
    for kind, options in (("threshold", {"max_coef": 4}), (Recorder, {})):
        with pytest.raises(ValueError, match=r"coef 9 is outside \[min_coef, max_coef\]"):
            build_controller(kind, {"coef": 9.0} | options, **RUN)


@pytest.mark.parametrize("kind", ["adaptive", "ziegler", "threshold", "exponential", "dual", "pid", CountsEpisodes])
@pytest.mark.parametrize("start", [0.002, 40.0])
def test_bounds_are_relative_to_the_start_unless_they_are_written(kind, start):
    """Scores a hundred times larger take a beta a hundred times larger."""
    start = 0.1 if kind is CountsEpisodes else start
    guarded = build_controller(kind, {}, **RUN | {"coef": start})
    assert (guarded.min_coef, guarded.max_coef) == pytest.approx((1e-3 * start, 1e3 * start))
    guarded = build_controller(kind, {"max_coef": 2 * start}, **RUN | {"coef": start})
    assert (guarded.min_coef, guarded.max_coef) == pytest.approx((1e-3 * start, 2 * start))


def test_an_automatic_coef_that_the_bounds_move_is_told_at_the_start():
    for kind in ("adaptive", "fixed"):
        facts = build_controller(kind, {"max_coef": 4.0}, **RUN | {"coef": 9.0}).start_facts(60, 64)
        assert facts == {"coef-moved": {"wanted": 9.0, "min_coef": 0.004, "max_coef": 4.0, "coef": 4.0}}
        assert len(worded(facts)) == 1
    assert not build_controller("fixed", {"max_coef": 4.0, "coef": 3.0}, **RUN | {"coef": 9.0}).start_facts(60, 64)


def test_a_resumed_beta_has_not_been_moved_by_its_bounds():
    guarded = build_controller("adaptive", {}, **RUN | {"coef": 9.0})
    state = guarded.state_dict()
    for _ in range(5):
        guarded.update(0.3, 64)
    assert guarded.coef != 9.0
    assert not guarded.start_facts(60, 64)
    guarded.load_state_dict(state)
    assert guarded.coef == 9.0


def test_bounds_of_a_signature_hold_for_a_plugin_that_ignores_them():
    guarded = build_controller(Recorder, {}, coef=1.0)
    guarded.update(0.1, 64)
    assert guarded.coef == 4.0


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'adaptve'; available: adaptive, .*, ziegler"):
        build_controller("adaptve", {})


def test_synonyms():
    assert isinstance(build_controller("proportional", {"horizon": 9}).controller, ZieglerKL)
    assert isinstance(build_controller("static", {}).controller, FixedKL)
