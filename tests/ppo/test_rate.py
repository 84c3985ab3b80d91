from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rlhf_kl.ppo.ceiling import CeilingResult
from rlhf_kl.ppo.rate import AdaptiveRate

TARGET = 0.1


def observe(
    rule: AdaptiveRate, n: int, kl: float, after: float, update_kl: float = 0.0, cut: bool = False,
    spent: bool = False, growth: float = 1.0,
) -> Any:  # fmt: skip
    move = CeilingResult(0.5 if cut else 1.0, kl, math.nan, after)
    return rule.observe(n, move, update_kl=update_kl, spent=spent, growth=growth)


def run(rule: AdaptiveRate, kls: list[float], **others: Any) -> list[Any]:
    """Facts of a change, update by update; each update leads to the next KL."""
    pairs = zip(kls, [*kls[1:], kls[-1]], strict=True)
    return [observe(rule, n, kl, after, **others) for n, (kl, after) in enumerate(pairs, start=1)]


def test_a_target_that_is_held_changes_nothing() -> None:
    rule = AdaptiveRate(TARGET, updates=60)
    assert not any(run(rule, [0.0, 0.01, 0.03, 0.06, 0.09, *[0.12, 0.09, 0.1] * 15], spent=True))
    assert rule.factor == 1.0


def test_an_update_of_more_than_half_the_way_is_too_long_at_once() -> None:
    rule = AdaptiveRate(TARGET, updates=60)
    assert observe(rule, 1, 0.0, 0.4)["learning-rate-changed"]["why"].startswith(
        "an update moved the KL from 0 to 0.4"
    )  # x from 0 to 2
    assert rule.factor == pytest.approx(0.25)  # so that it would have been half the way
    rule = AdaptiveRate(TARGET, updates=60)
    observe(rule, 1, 0.0, 40.0, 0.0)
    assert rule.factor == pytest.approx(0.2)  # one update is no proof of more


def test_a_policy_that_moves_far_sideways_gets_a_lower_rate_at_once() -> None:
    rule = AdaptiveRate(TARGET, updates=60)
    assert not observe(rule, 1, 0.1, 0.1, 0.04 * TARGET)
    assert observe(rule, 2, 0.1, 0.1, 0.1 * TARGET)["learning-rate-changed"]["why"].startswith(
        "the policy moved 10% of"
    )
    assert rule.factor == pytest.approx(0.5)  # half the rate, a quarter of the KL


def test_the_first_step_of_the_policy_may_be_large_whenever_it_comes() -> None:
    rule = AdaptiveRate(TARGET, updates=60, first=6)
    assert not observe(rule, 6, 0.0, 0.001, 0.5 * TARGET)
    assert observe(rule, 7, 0.001, 0.002, 0.5 * TARGET)


@pytest.mark.parametrize(("kl", "cut"), [(0.13, False), (0.1, True)])
def test_a_kl_that_beta_does_not_bring_back_halves_the_rate(kl: float, cut: bool) -> None:
    rule = AdaptiveRate(TARGET, updates=60)
    reasons = run(rule, [kl] * 8, cut=cut)
    assert [bool(reason) for reason in reasons] == [False, False, False, True] * 2
    assert rule.factor == 0.25


def test_a_target_out_of_reach_raises_the_rate_only_where_beta_is_spent() -> None:
    for spent, factor in ((False, 1.0), (True, 5.0**0.96)):
        rule = AdaptiveRate(TARGET, updates=60)
        run(rule, [TARGET * (0.01 * k) ** 2 for k in (0, 1, 2, 3, 4)], spent=spent)
        assert rule.factor == pytest.approx(factor)


def test_near_the_target_the_rate_is_raised_by_less() -> None:
    """A slow stretch there may be the noise of a few measurements."""
    for x, factor in ((0.4, 5.0**0.6), (0.7, 5.0**0.3), (0.8, 1.5)):
        rule = AdaptiveRate(TARGET, updates=60)
        run(rule, [TARGET * x**2] * 4, spent=True)
        assert rule.factor == pytest.approx(factor)


def test_a_kl_that_arrives_in_time_is_left_alone() -> None:
    rule = AdaptiveRate(TARGET, updates=60)
    run(rule, [TARGET * (0.12 * k) ** 2 for k in range(8)], spent=True)
    assert rule.factor == 1.0


def test_the_factor_is_bounded() -> None:
    low, high = AdaptiveRate(TARGET, updates=400), AdaptiveRate(TARGET, updates=400)
    for facts in (run(low, [0.2] * 60), run(high, [0.001] * 60, spent=True)):
        assert sum("learning-rate-at-bound" in fact for fact in facts) == 1
    assert (low.factor, high.factor) == (0.01, 10.0)


def test_a_beta_that_still_rises_and_a_kl_that_falls_are_given_time() -> None:
    for kls, growth in (([0.2] * 20, 1.1), ([0.4 * 0.97**k for k in range(20)], 1.0)):
        rule = AdaptiveRate(TARGET, updates=60)
        assert not any(run(rule, kls, growth=growth))
        assert rule.factor == 1.0


def test_a_saved_rule_goes_on_the_same() -> None:
    first, second = AdaptiveRate(TARGET, updates=60), AdaptiveRate(TARGET, updates=60)
    run(first, [0.2] * 6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(first, [0.2] * 5) == run(second, [0.2] * 5)
    assert first.state_dict() == second.state_dict()
