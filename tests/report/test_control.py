import math
from typing import Any

import pytest

from rlhf_kl.report.control import (
    end,
    held,
    is_update,
    log_beta_sd,
    ratios,
    tail,
    tail_error,
    time_in_band,
    worth,
)


def test_figures_counted_by_hand() -> None:
    values = [0.0] * 9 + [3.0] + [1.0] * 5 + [1.1, 0.9, 1.3, 1.0, 0.7]
    assert tail_error(values) == pytest.approx((0.1 + 0.1 + 0.3 + 0.3) / 10)
    assert time_in_band(values) == pytest.approx(4 / 6)  # updates 15 to 20; 18 and 20 are outside


def test_a_kl_that_was_not_finite_is_infinitely_far_off() -> None:
    rows = [{"kl/error": 0.5}, {"kl/error": None}]
    assert ratios(rows) == [1.5, math.inf]
    assert tail_error(ratios(rows)) == math.inf


def test_the_closing_evaluation_is_no_update() -> None:
    assert is_update({"step": 3, "kl/error": None})
    assert not is_update({"step": 4, "eval/perplexity": 3.0})


def row(scores: float | None, kl: float, coef: float, target: float = 1.0) -> dict[str, Any]:
    shaped = math.nan if scores is None else scores
    reward = {"objective/scores_shaped": shaped, "objective/rlhf_reward": shaped - coef * kl}
    return reward | {"kl/sequence": kl, "kl/error": kl / target - 1.0}


def test_the_best_row_is_chosen_by_a_figure_that_all_rows_share() -> None:
    """Where beta falls, score less beta times KL rises by itself."""
    rows = [row(1.0, 0.9, coef=1.0), row(1.2, 1.2, coef=0.5), row(1.1, 1.1, coef=0.01), row(2.0, 1.3, coef=0.01)]
    assert [worth(each, None) for each in rows] == [1.0, 1.2, 1.1, -math.inf]
    assert worth({"objective/scores_shaped": 1.0, "kl/error": None}, None) == -math.inf
    assert [worth(each, 1.0) for each in rows] == pytest.approx([0.1, 0.0, 0.0, 0.7])
    assert math.isnan(worth(row(None, 0.5, coef=1.0), None))


def test_how_quiet_beta_is_in_the_second_half() -> None:
    up, down = 0.1 * math.exp(0.2), 0.1 * math.exp(-0.2)
    assert log_beta_sd([5.0, 0.01, 5.0, 0.01, up, down, up, down]) == pytest.approx(0.2)
    assert log_beta_sd([]) is log_beta_sd([0.0] * 4) is None  # the second has no penalty


def test_short_runs() -> None:
    assert tail_error([]) is None
    assert time_in_band([1.0] * 14) is held([1.0] * 14) is None
    assert time_in_band([9.0] * 14 + [1.0]) == 1.0
    assert list(tail([1, 2, 3])) == list(end([1, 2, 3])) == [2, 3]
    assert list(end(list(range(30)))) == list(range(20, 30))


def test_held_takes_the_tail_error_and_the_time_in_band() -> None:
    assert held([1.0] * 60) is True
    assert held([1.0] * 45 + [1.3] * 10 + [1.0] * 5) is False  # tail error 0.1, but 36 of 46 updates in band
    assert held([1.2] * 60) is False  # always in band, but never at the target
