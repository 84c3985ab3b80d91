"""Each law on numbers worked by hand."""

import json
import math
from itertools import pairwise

import pytest

from rlhf_kl.control import (
    PIDKL,
    AdaptiveKL,
    DualKL,
    ExponentialKL,
    FixedKL,
    ScheduledKL,
    ThresholdKL,
    ZieglerKL,
    law_options,
)


def coefs_after(controller, kls, episodes=64):
    coefs = []
    for kl in kls:
        controller.update(kl, episodes)
        coefs.append(controller.coef)
    return coefs


def holding_coef(law):
    """exp of the mean of log b, the beta that is believed to hold the target."""
    return math.exp(float(law._belief.probabilities.sum(1) @ law._belief.log_holding))


def test_threshold_golden_sequence():
    coefs = coefs_after(ThresholdKL(), [0.01, 0.02, 0.05, 0.1, 0.03, 0.02])
    assert coefs == pytest.approx([0.1, 0.1, 0.15, 0.225, 0.225, 0.225], abs=1e-12)


def test_threshold_lowers_and_stops_at_its_bounds():
    assert coefs_after(ThresholdKL(coef=0.3), [0.0]) == pytest.approx([0.2])
    assert coefs_after(ThresholdKL(max_coef=1.0), [9.0] * 20)[-1] == 1.0
    assert coefs_after(ThresholdKL(min_coef=0.01), [0.0] * 20)[-1] == 0.01


@pytest.mark.parametrize("law", [AdaptiveKL, ZieglerKL, ThresholdKL, ExponentialKL, DualKL, PIDKL])
@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused_and_leaves_nothing_behind(law, kl):
    """One mean over an empty mask once made beta NaN for the rest of a loop, or held it where it was."""
    clean, other = (law(target=0.1, **({"total_episodes": 640} if law is ZieglerKL else {})) for _ in range(2))
    for step in range(8):
        for each in (clean, other):
            each.update(0.05 + 0.02 * step, 64)
        with pytest.raises(ValueError, match="finite"):
            other.update(kl, 64)
    assert other.coef == clean.coef
    assert other.state_dict() == clean.state_dict()


def test_ziegler_by_hand():
    # n/horizon = 0.2: clipped below (0.96), clipped above (1.04), unclipped error 0.1 (1.02)
    law = ZieglerKL(coef=1.0, target=0.1, horizon=320)
    assert coefs_after(law, [0.0, 0.5, 0.11]) == pytest.approx([0.96, 0.9984, 1.018368])


def test_ziegler_stays_positive_where_the_printed_law_flips_sign():
    law = ZieglerKL(coef=1.0, target=0.1, horizon=64)
    assert coefs_after(law, [0.0], episodes=64 * 20) == [0.5]
    assert coefs_after(law, [9.0], episodes=64 * 20) == [1.0]


def test_ziegler_horizon_auto_scales_with_the_run():
    assert ZieglerKL(horizon="auto", total_episodes=6400, batch_size=64).horizon == 320
    assert ZieglerKL(horizon="auto", total_episodes=640, batch_size=64).horizon == 64
    with pytest.raises(ValueError, match="total_episodes"):
        ZieglerKL(horizon="auto")


def test_exponential_doubles_and_smooths():
    assert coefs_after(ExponentialKL(gain=math.log(2), target=0.1), [1.1]) == pytest.approx([0.2])
    # smoothed KL 1.1, then 3/4 * 1.1 + 1/4 * 0.1 = 0.85: factors 4^1 and 4^0.75
    law = ExponentialKL(gain=math.log(4), target=0.1, smoothing=0.75)
    assert coefs_after(law, [1.1, 0.1]) == pytest.approx([0.4, 0.4 * 4**0.75])


def test_dual_is_additive_and_projected():
    assert coefs_after(DualKL(lr=0.02), [0.2, 0.0, 0.0]) == pytest.approx([0.12, 0.10, 0.08])
    assert coefs_after(DualKL(lr=0.02, min_coef=0.05), [0.0] * 9)[-1] == 0.05
    assert DualKL(lr=0.02, coef=0.1).reach(2, 64) == pytest.approx((0.06, 0.14))


def test_pid_terms_one_by_one():
    plain = {"target": 1.0, "hold": 0, "rate": 9.0}
    p = coefs_after(PIDKL(kp=1.0, ki=0.0, kd=0.0, **plain), [1.5, 1.0])
    assert p == pytest.approx([0.1 * math.exp(0.5), 0.1])
    i = coefs_after(PIDKL(kp=0.0, ki=0.1, kd=0.0, **plain), [1.5, 1.5, 1.0])
    assert i == pytest.approx([0.1 * math.exp(x) for x in (0.05, 0.1, 0.1)])
    d = coefs_after(PIDKL(kp=0.5, ki=0.0, kd=0.5, **plain), [1.0, 1.5, 1.5])
    assert d == pytest.approx([0.1 * math.exp(x) for x in (0.0, 0.5, 0.25)])


def test_pid_holds_a_cold_start_but_not_for_good():
    coefs = coefs_after(PIDKL(hold=3), [0.0] * 5)
    assert coefs[:3] == [0.1] * 3
    assert coefs[4] < coefs[3] < 0.1


def test_pid_does_not_wind_up_at_a_bound():
    law = PIDKL(coef=1.0, target=0.1, max_coef=2.0)
    assert coefs_after(law, [1.0] * 50)[-1] == 2.0
    assert coefs_after(law, [0.05] * 3)[-1] < 1.0


def test_pid_rate_limit():
    assert coefs_after(PIDKL(rate=0.1, kp=5.0), [9.0]) == pytest.approx([0.1 * math.exp(0.1)])


def test_fixed_is_fixed_and_may_be_zero():
    assert coefs_after(FixedKL(coef=0.3), [0.0, 9.0]) == [0.3, 0.3]
    assert coefs_after(FixedKL(coef=0.0), [9.0]) == [0.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("constant", [0.1] * 5), ("linear", [0.15, 0.2, 0.25, 0.3, 0.3]), ("cosine", [0.129289, 0.2, 0.270711, 0.3, 0.3])],
)
def test_schedule_follows_progress_and_not_the_kl(shape, expected):
    law = ScheduledKL(total_episodes=256, coef=0.1, end_coef=0.3, shape=shape)
    assert coefs_after(law, [0.0, 9.0, 0.0, 9.0, 0.0]) == pytest.approx(expected, abs=1e-6)


def test_adaptive_leaves_a_kl_at_target_alone():
    law = AdaptiveKL(coef=0.2, target=0.1)
    assert coefs_after(law, [0.1] * 30) == pytest.approx([0.2] * 30, rel=0.12)  # candidates are 5 % apart
    assert holding_coef(law) == pytest.approx(0.2, rel=0.1)


def made_runs(paces, log_holding, betas, momentum=0.4):
    """Distances of the law in the docstring, computed step by step: (x before, x after, beta) of each update."""
    x, step, updates = 0.0, 0.0, []
    for number, beta in enumerate(betas):
        drive = -math.tanh(1.5 * math.log(max(x, 0.05)) + math.log(beta) - log_holding)
        step = 1.65 * paces if number == 0 else momentum * step + (1 - momentum) * paces * drive
        updates.append((x, x + step, beta))
        x += step
    return updates


@pytest.mark.parametrize("holding", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("pace", [0.05, 0.2, 0.4])
def test_adaptive_finds_the_beta_that_holds_the_target(holding, pace):
    """From steps that another beta made: the belief is about the run, not about the beta in force."""
    law = AdaptiveKL(coef=0.2, target=0.1)
    betas = [holding * math.exp(math.sin(k)) for k in range(40)]
    for before, after, beta in made_runs(pace, math.log(holding), betas):
        law.coef = beta
        law.observe_update(0.1 * before**2, 0.1 * after**2, 0.1 * after**2)
        law.update(0.1 * before**2, 64)
    assert holding_coef(law) == pytest.approx(holding, rel=0.1)


def test_adaptive_believes_a_jump_that_no_noise_makes():
    """After a rollback the policy is another one: its measured distance counts, not the prediction."""
    law = AdaptiveKL(target=0.1)
    for before, after in [(0.0, 0.05), (0.05, 0.1), (0.1, 0.13), (0.01, 0.02)]:  # went back to 0.01
        law.observe_update(before, after, after)
        law.update(before, 64)
    assert law.distance == pytest.approx(math.sqrt(0.02 / 0.1))


def test_pid_has_no_derivative_before_its_second_update():
    coefs = []
    for kd in (0.0, 0.5):
        law = PIDKL(target=0.1, kp=0.1, ki=0.1, kd=kd, rate=10.0)
        law.update(0.15, 64)
        coefs.append(law.coef)
    assert coefs[0] == coefs[1] > 0.1


def test_adaptive_scales_a_way_that_is_too_long_and_expects_to_be_near_the_target():
    law = AdaptiveKL(target=0.1)
    for before, after in [(0.0, 0.05), (0.05, 0.1)]:
        law.observe_update(before, after, after)
        law.update(before, 64)
    assert law.scale() == 1.0  # at or below the target
    law.observe_update(0.1, 0.16, 0.16)
    law.update(0.1, 64)
    edge = 1.0 + math.sqrt(law.variance)  # what may be noise is left
    share = law.scale()
    assert share == pytest.approx(edge * math.sqrt(0.1 / 0.16), rel=0.05)
    assert law.distance == pytest.approx(edge)
    assert law.scale() == pytest.approx(1.0)


def test_adaptive_stays_near_a_beta_that_was_solved():
    """On the way to the target beta does not fall; from a start that is ten times too high it comes back at once."""
    for start, least, most in ((0.2, 0.15, 0.21), (2.0, 0.08, 0.5)):
        law = AdaptiveKL(coef=start, target=0.1)
        law.observe_solved(0.2, 1.0)
        for number in range(5):
            before, after = (0.1 * (0.05 * k) ** 2 for k in (number, number + 1))
            law.observe_update(before, after, after)
            law.update(before, 64)
        assert least < law.coef < most


def test_adaptive_does_not_lower_beta_where_the_score_does_not_rise():
    coefs = []
    for may_lower in (True, False, None):
        law = AdaptiveKL(coef=0.2, target=0.1)
        law.observe_progress(bool(may_lower))
        law.coef *= 4.0 if may_lower is None else 1.0  # since its start
        for number in range(5):
            before, after = (0.1 * (0.1 * k) ** 2 for k in (number, number + 1))
            law.observe_update(before, after, after)
            law.update(before, 64)
        coefs.append(law.coef)
    assert coefs[0] < 0.2 == coefs[1]
    assert 0.2 <= coefs[2] < 0.8


def test_adaptive_spreads_its_guess_by_what_the_samples_did_not_tell():
    spreads = []
    for solved in ((0.2, 1.0), (0.2, 0.1), None):
        law = AdaptiveKL(coef=0.2, target=0.1)
        if solved is not None:
            law.observe_solved(*solved)
        spreads.append(law.spread)
    assert spreads == sorted(spreads)
    assert len(set(spreads)) == 3


def test_adaptive_holds_beta_where_the_target_is_out_of_reach():
    """Steps of half a percent, whatever beta is: it stays well above its bound."""
    law = AdaptiveKL(coef=0.2, target=0.1)
    for number in range(60):
        before, after = (0.1 * (0.005 * k) ** 2 for k in (number, number + 1))
        law.observe_update(before, after, after)
        law.update(before, 64)
    assert law.coef > 5 * law.min_coef


def test_adaptive_expects_a_longer_step_of_a_higher_learning_rate():
    steps = []
    for factor in (1.0, 3.0):
        law = AdaptiveKL(coef=0.2, target=0.1)
        for before, after, _ in made_runs(0.05, math.log(0.2), [0.2] * 6):
            law.observe_update(0.1 * before**2, 0.1 * after**2, 0.1 * after**2)
            law.update(0.1 * before**2, 64)
        law.observe_rate(factor)
        steps.append(law.predict(0.1 * after**2))
    assert steps[1] == pytest.approx(3.0 * steps[0])


def test_a_saved_belief_keeps_its_meaning_beside_another_start():
    first, second = AdaptiveKL(coef=0.2, target=0.1), AdaptiveKL(coef=2.0, target=0.1, min_coef=0.01)
    coefs_after(first, [0.0, 0.05, 0.1, 0.12, 0.1])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert holding_coef(second) == pytest.approx(holding_coef(first))
    second.update(0.1, 64)


def test_adaptive_moves_at_most_its_rate():
    coefs = [0.1, *coefs_after(AdaptiveKL(down=0.3, up=0.7), [0.0, 0.0, 5.0, 50.0, 0.0, 0.0, 0.1, 3.0])]
    steps = [math.log(b / a) for a, b in pairwise(coefs)]
    assert min(steps) >= -0.3 - 1e-9
    assert max(steps) <= 0.7 + 1e-9
    assert AdaptiveKL(down=0.3, up=0.7).log_steps(64) == (0.3, 0.7)


@pytest.mark.parametrize(
    ("cls", "options", "word"),
    [
        (ThresholdKL, {"target": -0.1}, "target"),
        (ThresholdKL, {"low": 2.0}, "low"),
        (ThresholdKL, {"factor": 1.0}, "factor"),
        (ThresholdKL, {"min_coef": 2.0, "max_coef": 1.0}, "min_coef"),
        (ZieglerKL, {"horizon": "soon"}, "horizon"),
        (ZieglerKL, {"horizon": 10, "coef": 0.0}, "coef"),
        (ExponentialKL, {"smoothing": 1.0}, "smoothing"),
        (DualKL, {"lr": 0.0}, "lr"),
        (PIDKL, {"kp": 0.0, "ki": 0.0}, "kp"),
        (FixedKL, {"coef": -0.1}, "coef"),
        (FixedKL, {"coef": math.inf}, "coef"),
        (ScheduledKL, {"total_episodes": 9, "shape": "square"}, "shape"),
        (AdaptiveKL, {"approach": 1.0}, "approach"),
    ],
)
def test_options_that_make_no_sense_are_refused(cls, options, word):
    with pytest.raises(ValueError, match=word):
        cls(**options)


def test_a_cut_update_counts_with_its_full_length() -> None:
    law = AdaptiveKL(target=0.1)
    for before, after, uncut in [(0.0, 0.03, 0.03), (0.03, 0.05, 0.09)]:
        law.observe_update(before, after, uncut)
        law.update(before, 64)
    assert law.last_step == pytest.approx(math.sqrt(0.9) - math.sqrt(0.3))
    assert law.distance == pytest.approx(math.sqrt(0.5), abs=0.05)


class Gentle(ThresholdKL):
    """A user's law on top of one of ours, with options of its own."""

    def __init__(self, pace, target=0.1):
        super().__init__(target=target, factor=1.0 + pace, low=0.4)
        self.pace = pace


def test_a_subclass_may_have_options_of_its_own():
    assert coefs_after(Gentle(0.5), [0.0]) == pytest.approx([0.1 / 1.5])
    assert law_options(Gentle, {"pace": 0.5}, "c") == ({"pace": 0.5}, [])
    assert [line.partition(": ")[0] for line in law_options(Gentle, {}, "c")[1]] == ["c.pace"]
    with pytest.raises(ValueError, match="factor"):
        coefs_after(Gentle(-1.0), [0.0])
