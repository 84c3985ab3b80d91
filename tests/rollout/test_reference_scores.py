import math
import random

import pytest

from rlhf_kl.rollout.reference_scores import ReferenceScores


@pytest.fixture(scope="module")
def gaussian() -> ReferenceScores:
    """Scores of spread 1 within prompts, whose means differ by much more."""
    rng = random.Random(0)
    groups = [i // 32 for i in range(4096)]
    return ReferenceScores([10.0 * (g % 3) + rng.gauss(0, 1) for g in groups], groups, 30.0)


def test_the_tilt_follows_the_gaussian_law_where_kl_is_small(gaussian: ReferenceScores) -> None:
    curve = [point for point in gaussian.summary()["tilt"] if 0.01 < point["kl"] < 1.0]
    assert len(curve) > 5
    for point in curve:
        assert point["kl"] == pytest.approx(1 / (2 * point["coef"] ** 2), rel=0.15)
        assert point["gain"] == pytest.approx(math.sqrt(2 * point["kl"]), rel=0.1)


def test_the_curve_ends_where_the_samples_can_no_longer_tell(gaussian: ReferenceScores) -> None:
    curve = gaussian.summary()["tilt"]
    kls = [point["kl"] for point in curve]
    assert kls == sorted(kls)
    assert kls[0] < 0.002
    assert 3.0 < kls[-1] < math.log(4096 / 10)  # effective samples at least 10: KL at most log(n / 10)


def test_no_policy_beats_the_tilt_by_choosing_the_best_of_n(gaussian: ReferenceScores) -> None:
    found = gaussian.summary()
    best = found["best_of_n"]
    assert [point["n"] for point in best] == [1, 2, 4, 8, 16, 32]
    assert best[1]["gain"] == pytest.approx(1 / math.sqrt(math.pi), rel=0.05)  # E max of two normals
    assert found["scores_spread"] == pytest.approx(1.0, rel=0.05)


def test_constant_scores_buy_nothing() -> None:
    found = ReferenceScores([1.0] * 64, [0] * 64, 5.0, gold=[2.0] * 64).summary()
    assert found["tilt"] == []
    assert found["gold"] == 2.0
    assert found["best_of_n"][-1]["gain"] == 0.0
