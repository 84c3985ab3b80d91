from __future__ import annotations

import json
import math

import pytest

from rlhf_kl.control.ceiling import CeilingResult
from rlhf_kl.control.rate import PacedRate, Progress
from rlhf_kl.events import Event, LearningRateAtBound, LearningRateChanged
from rlhf_kl.ops.masked import Mean

TARGET = 0.1


def observe(rule: PacedRate, n: int, x: float, after: float, update_kl: float = 0.0) -> list[Event]:
    """An update from distance x = sqrt(KL/target) to another at the states of its rollout."""
    events = rule.choose(n, TARGET * x**2)
    return events + rule.observe(n, CeilingResult(1.0, TARGET * x**2, math.nan, TARGET * after**2), update_kl)


def travel(rule: PacedRate, pace: float, updates: int) -> list[float]:
    """The distance after each update of a policy whose steps are `pace` times the factor, the first one longer."""
    x, way = 0.0, []
    for n in range(1, updates + 1):
        rule.choose(n, TARGET * x**2)
        x += pace * rule.factor * (2.5 if n == 1 else 1.0) * (x < 1.0)
        way.append(x)
    rule.choose(updates + 1, TARGET * x**2)
    return way


@pytest.mark.parametrize("pace", [0.03, 0.06, 0.1, 0.2])
@pytest.mark.parametrize(("updates", "plan"), [(30, 4), (60, 6), (200, 10)])
def test_the_target_is_reached_as_planned(pace: float, updates: int, plan: int) -> None:
    """Whatever the steps at the peak rate are; one update more, as the first one only measures."""
    rule = PacedRate(TARGET, updates)
    way = travel(rule, pace, plan + 2)
    assert next(n for n, x in enumerate(way, start=1) if x >= 0.9) <= plan + 1
    assert max(way) < 1.5
    assert pace * rule.factor <= 0.04 + 1e-9
    assert rule.factor <= 2.0


@pytest.mark.parametrize("tokens", [1.0, 30.0])
def test_no_update_on_the_way_is_planned_to_move_the_policy_too_far(tokens: float) -> None:
    """The target is so far that the plan alone would raise the rate to its bound."""
    rule, factors = PacedRate(10.0 * tokens, 60), []
    for n in range(1, 9):
        kl = 1e-3 * n * tokens
        rule.choose(n, kl)
        moved = 0.005 * rule.factor**2 * (2.5**2 if n == 1 else 1.0)  # nats per token, with the square of the rate
        rule.observe(n, CeilingResult(1.0, kl, math.nan, kl), moved * tokens, tokens)
        factors.append(rule.factor)
    assert factors[0] == 1.0
    assert factors[1:] == pytest.approx([2.0] * 7)  # 0.005 * 2**2 = 0.02


def test_updates_without_a_step_tell_no_pace() -> None:
    """As those whose steps all overflow: that the KL stands still is no reason to raise the rate."""
    rule, still = PacedRate(TARGET, 60), PacedRate(TARGET, 60)
    for n in range(1, 4):
        observe(rule, n, 0.0, 0.0, math.nan)
        observe(still, n, 0.0, 0.0, 0.0)
    assert (rule.factor, rule.pace) == (1.0, None)
    assert still.factor > 1.5
    observe(rule, 4, 0.0, 0.05, 1e-4)
    observe(rule, 5, 0.05, 0.1, 1e-4)
    assert rule.pace == pytest.approx(0.05)


def test_near_the_target_the_rate_only_falls() -> None:
    rule = PacedRate(TARGET, 60)
    travel(rule, 0.05, 8)
    factors = []
    for n, x in enumerate([1.0, 0.9, 0.87, 0.93, 1.1], start=9):
        observe(rule, n, x, x)
        factors.append(rule.factor)
    assert factors == sorted(factors, reverse=True)


def test_an_update_of_more_than_half_the_way_near_the_target_is_too_long_at_once() -> None:
    """From the target to four times its KL: the policies are about that far from the one that sampled."""
    rule = PacedRate(TARGET, 60)
    travel(rule, 0.05, 8)
    before = rule.factor
    (event,) = observe(rule, 9, 1.0, 2.0, 0.4 * TARGET)
    assert isinstance(event, LearningRateChanged)
    assert rule.factor == pytest.approx(before / 4)  # a sixteenth of the KL, half of what is too much


def test_a_first_update_beyond_the_target_lowers_the_rate() -> None:
    """To the rate that it shows to be right for a hold; the first step of a policy is longer than the later ones."""
    rule = PacedRate(TARGET, 60)
    assert isinstance(observe(rule, 1, 0.0, 5.0, 10.0 * TARGET)[0], LearningRateChanged)
    assert rule.factor == pytest.approx(2.5 * math.sqrt(0.025 / 10.0))
    rule.choose(2, TARGET * 5.0**2)
    assert rule.factor == pytest.approx(0.04 / 2.0)  # and by what the next rollout tells


def test_a_policy_that_moves_far_sideways_gets_a_lower_rate_at_once() -> None:
    rule = PacedRate(TARGET, 60)
    travel(rule, 0.05, 8)
    before = rule.factor
    assert not observe(rule, 9, 1.0, 1.0, 0.04 * TARGET)
    why = "an update's KL to the policy before is 10% of the target"
    assert observe(rule, 10, 1.0, 1.0, 0.1 * TARGET) == [LearningRateChanged(why, rule.factor)]
    assert rule.factor == pytest.approx(before / 2)  # half the rate, a quarter of the KL


def test_a_target_out_of_reach_is_told_once() -> None:
    rule = PacedRate(TARGET, 40, first=6)
    events = [event for n in range(6, 40) for event in observe(rule, n, 0.01, 0.01)]
    assert events == [LearningRateAtBound("after 18 updates the KL is at 0% of its target", 10.0)]


def test_the_first_step_of_the_policy_is_longer_whenever_it_comes() -> None:
    for first in (1, 6):
        rule = PacedRate(TARGET, 60, first=first)
        for n, x in enumerate([0.0, 0.25], start=first):
            rule.choose(n, TARGET * x**2)
        assert rule.pace == pytest.approx(0.1)


def test_a_figure_that_is_not_finite_changes_nothing() -> None:
    rule = PacedRate(TARGET, 60)
    assert not rule.observe(1, CeilingResult(1.0, 0.0, math.nan, math.nan), 0.0)
    assert rule.factor == 1.0


def test_a_saved_rule_goes_on_the_same() -> None:
    first, second = PacedRate(TARGET, 60), PacedRate(TARGET, 60)
    travel(first, 0.03, 3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for n, (x, after) in enumerate([(0.3, 0.5), (0.5, 0.95), (0.95, 1.7)], start=4):
        assert observe(first, n, x, after) == observe(second, n, x, after)
        assert first.state_dict() == second.state_dict()


def test_without_progress_the_rate_does_not_rise() -> None:
    factors = []
    for progress in (True, False):
        rule = PacedRate(TARGET, 60)
        for n, x in enumerate([0.0, 0.51, 0.52, 0.53], start=1):
            rule.choose(n, TARGET * x**2, progress=progress)
        factors.append(rule.factor)
    assert factors[0] > 1.0 > factors[1]


def test_a_rollout_that_is_far_again_ends_the_hold() -> None:
    """The target seems to be reached, and the next rollout has half of it: the rate rises again."""
    rule = PacedRate(TARGET, 60)
    factors = []
    for n, x in enumerate([0.0, 0.5, 0.95, 0.7, 0.72], start=1):
        rule.choose(n, TARGET * x**2)
        factors.append(rule.factor)
    assert factors[2] < factors[4]


def test_kl_without_a_higher_score_is_no_progress() -> None:
    """A score that stays within its noise, one that rises, one that rises late, and one whose reference has none."""
    start = Mean(1.0, 0.1)
    flat, rising, late, unknown = Progress(start), Progress(start), Progress(start), Progress(None)
    for n in range(10):
        x = 0.2 * n
        events = flat.observe(Mean(1.05, 0.1), x, most=3.0 * x)
        assert flat.made == (n < 5)  # x is 0.6 at n = 3: two more rollouts are waited for
        assert bool(events) == (n == 5)  # once
        assert not rising.observe(Mean(1.0 + 0.4 * n, 0.1), x, most=3.0 * x)
        assert not unknown.observe(Mean(1.0, 0.1), x, most=3.0 * x)
        assert rising.made
        assert unknown.made
        late.observe(Mean(1.0 if n < 6 else 2.0, 0.1), x, most=3.0 * x)
    assert late.made
    again = Progress(start)
    again.load_state_dict(json.loads(json.dumps(flat.state_dict())))
    assert again.observe(Mean(1.05, 0.1), 1.0, 3.0) == flat.observe(Mean(1.05, 0.1), 1.0, 3.0) == []
    assert again.state_dict() == flat.state_dict()
    assert not again.made
    again.observe(Mean(1.05, 0.1), 0.3, 1.0)  # back near the reference
    assert again.made


def test_a_noisy_score_is_no_proof_that_nothing_is_learned() -> None:
    """The same rise within the same noise: little of what the KL allows, or perhaps much of it."""
    made = []
    for most in (3.0, 1.2):  # 0.05 and two standard errors of at least 0.1 are more than a fifth of 1.2
        rule = Progress(Mean(1.0, 0.1))
        for _ in range(5):
            rule.observe(Mean(1.05, 0.1), 1.0, most)
        made.append(rule.made)
    assert made == [False, True]
