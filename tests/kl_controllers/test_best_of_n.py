import math
import random
from itertools import combinations
from statistics import fmean

import pytest

from rlhf_kl.kl_controllers.tilt import best_of_n, kl_bound


def test_the_mean_over_all_subsets() -> None:
    rng = random.Random(3)
    scores = [rng.gauss(0, 1) for _ in range(6)]
    golds = [rng.gauss(0, 1) for _ in range(6)]
    curve = {point.n: point for point in best_of_n(scores, ["same"] * 6, golds)}
    assert list(curve) == [1, 2, 4]
    for n in curve:
        chosen = [max(subset, key=lambda i: scores[i]) for subset in combinations(range(6), n)]
        assert curve[n].gain == pytest.approx(fmean(scores[i] for i in chosen) - fmean(scores))
        assert curve[n].gold_gain == pytest.approx(fmean(golds[i] for i in chosen) - fmean(golds))


def test_ties_are_broken_evenly() -> None:
    curve = best_of_n([1.0, 1.0, 0.0, 0.0], [0] * 4, [4.0, 8.0, 0.0, 2.0])
    # Of six pairs one has no 1.0: gold (0 + 2)/2; five have gold (4 + 8)/2.
    assert curve[1].gold_gain == pytest.approx((5 * 6.0 + 1.0) / 6 - 3.5)


def test_only_the_spread_within_a_prompt_can_be_bought() -> None:
    flat = best_of_n([5.0, 5.0, -5.0, -5.0], ["a", "a", "b", "b"])
    assert [point.gain for point in flat] == pytest.approx([0.0, 0.0])
    assert flat[1].gold_gain is None


def test_the_curve_ends_where_less_than_half_of_the_groups_have_so_many() -> None:
    """Groups that are smaller are left out, of the mean that the gain is counted from as well."""
    curve = best_of_n([1.0, 3.0, 5.0, 5.0, 5.0], [0, 0, 1, 2, 2])
    assert [(point.n, point.gain) for point in curve] == [(1, 0.0), (2, pytest.approx(0.5))]
    assert [point.n for point in best_of_n([1.0, 3.0, 5.0, 5.0], [0, 0, 1, 2])] == [1]
    assert best_of_n([], []) == []


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_bound_is_above_the_kl_of_a_discrete_reference(n: int) -> None:
    """Three outcomes with known probabilities: the distribution of the best of n is exact."""
    probabilities = [0.5, 0.3, 0.2]
    below = [0.0, 0.5, 0.8, 1.0]
    best = [below[i + 1] ** n - below[i] ** n for i in range(3)]
    kl = sum(b * math.log(b / p) for b, p in zip(best, probabilities, strict=True))
    assert 0 < kl <= kl_bound(n)


def test_the_bound_is_tight_for_many_outcomes() -> None:
    outcomes, n = 20_000, 4
    best = [((i + 1) / outcomes) ** n - (i / outcomes) ** n for i in range(outcomes)]
    kl = sum(b * math.log(b * outcomes) for b in best)
    assert kl == pytest.approx(kl_bound(n), rel=1e-3)
