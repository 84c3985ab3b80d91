import math

import pytest

from rlhf_kl.control.verdict import end, ratios, tail, tail_error, time_in_band, verdict


def test_figures_counted_by_hand() -> None:
    values = [0.0] * 9 + [3.0] + [1.0] * 5 + [1.1, 0.9, 1.3, 1.0, 0.7]
    assert tail_error(values) == pytest.approx((0.1 + 0.1 + 0.3 + 0.3) / 10)
    assert time_in_band(values) == pytest.approx(4 / 6)  # updates 15 to 20; 18 and 20 are outside


def test_a_kl_that_was_not_finite_is_infinitely_far_off() -> None:
    rows = [{"kl/error": 0.5}, {"kl/error": None}]
    assert ratios(rows) == [1.5, math.inf]
    assert tail_error(ratios(rows)) == math.inf


def test_short_runs() -> None:
    assert tail_error([]) is None
    assert time_in_band([1.0] * 14) is None
    assert time_in_band([9.0] * 14 + [1.0]) == 1.0
    assert list(tail([1, 2, 3])) == list(end([1, 2, 3])) == [2, 3]
    assert list(end(list(range(30)))) == list(range(20, 30))


RISES = [0.72 * min(1.0, step / 25) ** 2 for step in range(1, 31)]  # a small real model: 0.72x the target, and rising


@pytest.mark.parametrize(
    ("values", "word", "since"),
    [
        ([1.0] * 60, "held", 1),
        ([1.0] * 45 + [1.3] * 10 + [1.0] * 5, "missed", None),  # tail error 0.1, but 36 of 46 updates in band
        ([1.2] * 60, "missed", None),  # always in band, but never at the target
        ([0.1] * 12 + [1.1] * 48, "held", 13),
        ([0.1] * 30 + [1.0] * 30, "late", 31),
        ([0.02 * step for step in range(50)] + [1.0] * 10, "late", 39),
        ([0.1] * 14 + [1.3] * 8 + [1.0] * 38, "late", 23),
        ([1.0] * 30 + [1.2] * 30, "missed", None),  # a good first half is no late one
        ([1.0] * 56 + [2.0] * 4, "missed", None),
        ([1.0] * 54 + [1.26] * 6, "missed", None),
        ([0.1] * 51 + [1.0] * 9, "short", 52),  # nine updates in band: one is missing
        ([0.1] * 50 + [1.3, 1.4] + [1.0] * 8, "short", 53),  # it fell into the band, from too fast a rise
        ([0.1] * 20 + [0.7 - 0.02 * step for step in range(10)], "missed", None),  # it rose and falls again
        ([0.1] * 30 + [1.0, 1.4] * 15, "missed", None),
        ([min(0.7, 0.1 * step) for step in range(60)], "missed", None),  # it has stopped below the band
        ([0.001 * step for step in range(60)], "missed", None),  # it rises, but it is far away
        ([0.5 + 0.05 * step for step in range(40)], "missed", None),  # through the band
        ([math.inf] * 20, "missed", None),
        (RISES, "short", None),
        ([1.0] * 14, "short", None),
        ([], "short", None),
    ],
)
def test_the_verdict_in_three_words(values: list[float], word: str, since: int | None) -> None:
    assert verdict(values)[:2] == (word, since)
