from __future__ import annotations

import math
import random
from itertools import combinations
from statistics import NormalDist, fmean, pvariance

import pytest

from rlhf_kl.control.tilt import (
    best_of_n,
    centre_groups,
    gain_at_kl,
    has_few_values,
    kl_bound,
    kl_limit,
    least_kl,
    normal_limit,
    solve_tilt,
    tilted,
)

NORMAL = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]


def test_two_scores_by_hand():
    # beta = 1/ln 3 makes the weights 1/4 and 3/4
    tilt = tilted([0.0, 1.0], 1.0 / math.log(3.0))
    assert tilt.kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert tilt.gain == pytest.approx(0.25)
    assert tilt.ess == pytest.approx(1.6)


@pytest.mark.parametrize("coef", [1.0, 2.0, 4.0])
def test_gaussian_scores_follow_the_gaussian_law(coef):
    tilt = tilted(NORMAL, coef)
    assert tilt.kl == pytest.approx(0.5 / coef**2, rel=0.02)
    assert tilt.gain == pytest.approx(1.0 / coef, rel=0.02)


def test_a_vanishing_beta_picks_the_best_and_does_not_overflow():
    tilt = tilted([0.0, 1.0, 2.0, 3.0], 1e-300)
    assert tilt == pytest.approx((math.log(4), 1.5, 1.0))


def test_solve_inverts_the_gaussian_law():
    assert solve_tilt(NORMAL, 0.5).coef == pytest.approx(1.0, rel=0.01)
    assert gain_at_kl(NORMAL, 0.5) == pytest.approx(1.0, rel=0.01)
    assert not solve_tilt(NORMAL, 0.5).extrapolated


def test_beyond_the_samples_it_extrapolates_and_says_so():
    few = NORMAL[::32]
    solution = solve_tilt(few, 8.0)
    assert solution.extrapolated
    assert solution.coef == pytest.approx(0.25, rel=0.25)  # the law: 1 / sqrt(16)
    assert gain_at_kl(few, 8.0) is None


def test_gain_at_no_kl_is_nothing():
    assert gain_at_kl(NORMAL, 0.0) == 0.0
    assert gain_at_kl(NORMAL, math.nan) is None
    assert gain_at_kl([1.0, 2.0], 0.1) is None


@pytest.mark.parametrize(
    ("scores", "kl", "word"),
    [([1.0] * 100, 0.1, "constant"), ([1.0, 2.0], 0.1, "too few"), (NORMAL, 0.0, "target_kl"), ([], 0.1, "constant")],
)
def test_scores_without_a_solution_are_an_error(scores, kl, word):
    with pytest.raises(ValueError, match=word):
        solve_tilt(scores, kl)


def test_groups_lose_their_means_and_keep_their_spread():
    rng = random.Random(0)
    groups = [g for g in range(2000) for _ in range(3)]
    offsets = [rng.gauss(0, 10) for _ in range(2000)]
    centred = centre_groups([offsets[g] + rng.gauss(0, 2) for g in groups], groups)
    assert math.fsum(centred) == pytest.approx(0.0, abs=1e-6)
    assert pvariance(centred) == pytest.approx(4.0, rel=0.06)


def test_groups_of_one_are_left_out_unless_there_are_no_others():
    assert centre_groups([1.0, 3.0, 50.0], ["a", "a", "b"]) == pytest.approx([-math.sqrt(2), math.sqrt(2)])
    assert len(centre_groups([1.0, 3.0, 50.0], ["a", "b", "c"])) == 3


def points(scores, least=0.7, most=30.0, count=24):
    coefs = [most * (least / most) ** (i / (count - 1)) for i in range(count)]
    return [{"coef": coef, "kl": tilt.kl, "gain": tilt.gain} for coef in coefs for tilt in [tilted(scores, coef)]]


@pytest.mark.parametrize("gain", [0.1, 0.3, 0.5, 1.0])
def test_the_least_kl_of_a_gain_by_the_gaussian_law(gain):
    curve = points([5.0 + 3.0 * x for x in NORMAL], least=2.5, most=90.0)
    assert least_kl(curve, 3.0 * gain) == pytest.approx(gain**2 / 2, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_kl_inverts_the_gain(seed):
    rng = random.Random(seed)
    scores = [rng.choice([0.0, rng.expovariate(1.0), rng.gauss(0, 1)]) for _ in range(1024)]
    for kl in (0.01, 0.03, 0.1, 0.3, 0.7):
        gain = gain_at_kl(scores, kl)
        assert least_kl(points(scores), gain) == pytest.approx(kl, rel=0.01)
        assert least_kl(points(scores), gain) <= kl * (1 + 1e-3)


def test_no_policy_has_a_gain_for_less_than_the_least_kl():
    """Random reweightings of the samples, their KL and gain by enumeration."""
    rng = random.Random(0)
    scores = [rng.gauss(0, 1) for _ in range(300)]
    curve, mean = points(scores, least=0.3), math.fsum(scores) / 300
    for trial in range(200):
        width = 0.05 * (1 + trial % 60)
        raw = [math.exp(width * (score + rng.gauss(0, 0.5))) for score in scores]
        weights = [weight / math.fsum(raw) for weight in raw]
        kl = math.fsum(w * math.log(300 * w) for w in weights)
        gain = math.fsum(w * s for w, s in zip(weights, scores, strict=True)) - mean
        assert least_kl(curve, gain) <= kl + 1e-12


def test_the_least_kl_beyond_the_samples_is_a_lower_bound():
    curve = points(NORMAL, least=1.0)  # up to a gain of 1
    assert least_kl(curve, 1.5) == pytest.approx(1.0, rel=0.02)  # the tangent; the law says 1.125
    assert least_kl(curve, -1.0) == least_kl(curve, 0.0) == least_kl([], 1.0) == 0.0


def test_groups_over_their_own_spread_and_those_without_any() -> None:
    """A prompt whose scores are all equal buys no KL, and counts."""
    scores = [1.0, 3.0, 10.0, 50.0, 7.0, 7.0]
    assert centre_groups(scores, [0, 0, 1, 1, 2, 2], scale=True) == [-1.0, 1.0, -1.0, 1.0, 0.0, 0.0]


def test_right_or_wrong_ends_at_the_limit_of_its_kl() -> None:
    """Half of the answers are right: the KL of answering right always is log 2, and beta stops before it is 0."""
    solution = solve_tilt([1] * 80 + [0] * 80, 3.6)
    assert solution.limit == pytest.approx(math.log(2))
    assert solution.tilt.kl == pytest.approx(0.99 * math.log(2), rel=1e-3)
    assert 0.1 < solution.coef < 0.2


def by_prompt(*right: int, each: int = 8) -> tuple[list[float], list[int]]:
    """0/1 scores of `each` responses to every prompt, of which so many are right."""
    scores = [float(i < n) for n in right for i in range(each)]
    return scores, [prompt for prompt in range(len(right)) for _ in range(each)]


def test_a_policy_moves_no_probability_between_prompts() -> None:
    """Of 20 prompts one is solved every second time and one always: only the first can pay, log 2 of 20 prompts."""
    scores, groups = by_prompt(4, 8, *[0] * 18)
    assert has_few_values(scores, groups)
    assert kl_limit(scores, groups) == pytest.approx(math.log(2) / 20)
    assert kl_limit(scores) == pytest.approx(math.log(160 / 12))
    tilt = tilted(scores, 0.01, groups)
    assert (tilt.kl, tilt.gain) == (pytest.approx(math.log(2) / 20), pytest.approx(0.5 / 20))
    assert solve_tilt(scores, 3.0, groups=groups).coef == pytest.approx(0.1417, rel=1e-2)  # as for one such prompt
    assert gain_at_kl(scores, math.log(2) / 20, groups=groups) == pytest.approx(0.5 / 20, rel=1e-2)
    assert gain_at_kl(scores, 3.0, groups=groups) is None  # more samples might hold a better response


def test_within_prompts_the_tilt_is_that_of_each_prompt() -> None:
    """Two prompts by hand: at beta = 1/ln 3 a right answer weighs three times a wrong one."""
    scores, groups = by_prompt(1, 2, each=3)
    tilt = tilted(scores, 1 / math.log(3), groups)
    first = 0.6 * math.log(3 * 0.6) + 0.4 * math.log(3 * 0.2)
    second = 6 / 7 * math.log(3 * 3 / 7) + 1 / 7 * math.log(3 / 7)
    assert tilt.kl == pytest.approx((first + second) / 2)
    assert tilt.gain == pytest.approx((0.6 + 6 / 7 - 1) / 2)


@pytest.mark.parametrize(
    ("score", "few"),
    [
        (lambda rng: rng.gauss(0, 1), False),
        (lambda rng: float(rng.random() < 0.3), True),
        (lambda rng: float(rng.random() < 0.01), True),
        (lambda rng: rng.choice([0.0, 0.5, 1.0]), True),
        (lambda rng: float(rng.randrange(20)), False),  # as a length: the best of eight is not the best there is
        (lambda rng: -1.0 if rng.random() < 0.7 else rng.gauss(0, 1), False),  # a penalty beside a continuous score
        (lambda rng: 7.0, True),
    ],
)
@pytest.mark.parametrize("each", [4, 8])
def test_few_values(score, few, each) -> None:
    rng = random.Random(0)
    groups = [prompt for prompt in range(60) for _ in range(each)]
    assert has_few_values([score(rng) for _ in groups], groups) == few


def test_the_mean_over_all_subsets() -> None:
    rng = random.Random(3)
    scores = [rng.gauss(0, 1) for _ in range(6)]
    curve = {point.n: point for point in best_of_n(scores, ["same"] * 6)}
    assert list(curve) == [1, 2, 4]
    for n in curve:
        assert curve[n].gain == pytest.approx(fmean(map(max, combinations(scores, n))) - fmean(scores))


def test_the_curve_ends_where_less_than_half_of_the_groups_have_so_many() -> None:
    """Groups that are smaller are left out, of the mean that the gain is counted from as well."""
    curve = best_of_n([1.0, 3.0, 5.0, 5.0, 5.0], [0, 0, 1, 2, 2])
    assert [(point.n, point.gain) for point in curve] == [(1, 0.0), (2, pytest.approx(0.5))]
    assert [point.n for point in best_of_n([1.0, 3.0, 5.0, 5.0], [0, 0, 1, 2])] == [1]
    assert best_of_n([], []) == []


def test_the_bound_is_tight_for_many_outcomes() -> None:
    outcomes, n = 20_000, 4
    best = [((i + 1) / outcomes) ** n - (i / outcomes) ** n for i in range(outcomes)]
    kl = sum(b * math.log(b * outcomes) for b in best)
    assert kl == pytest.approx(kl_bound(n), rel=1e-3)


def test_the_limit_of_gaussian_scores_holds_for_each_reweighting_and_is_silent_elsewhere() -> None:
    curve, spread = points(NORMAL), 1.0
    for kl in (0.05, 0.3, 0.9):
        assert normal_limit(spread, curve, kl) == pytest.approx(math.sqrt(2 * kl))
        assert gain_at_kl(NORMAL, kl) == pytest.approx(math.sqrt(2 * kl), rel=0.01)  # which the tilt reaches
    assert normal_limit(spread, curve, 20.0) is None  # beyond the samples
    heavy = [math.exp(2 * x) for x in NORMAL]
    deviation = math.sqrt(pvariance(heavy))
    assert normal_limit(deviation, points(heavy, least=3.0, most=300.0), 0.3) is None
    assert normal_limit(spread, [], 0.3) is None
