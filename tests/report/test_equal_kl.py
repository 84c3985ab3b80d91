from __future__ import annotations

import pytest

from rlhf_kl.report.equal_kl import interpolate, mean_interval, student_t


def test_nothing_is_extrapolated() -> None:
    assert interpolate([(3.0, 6.0), (1.0, 2.0)], 1.5) == pytest.approx(3.0)
    assert interpolate([(1.0, 2.0), (3.0, 6.0)], 3.1) is None
    assert interpolate([(1.0, 2.0)], 1.0) is None


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (5, 2.571), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_student_t_against_a_printed_table(freedom: int, quantile: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(quantile, abs=2e-3)


def test_an_interval_from_five_values_on() -> None:
    assert mean_interval([1.0, 2.0, 3.0, 4.0]) is None
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((3 - 1.963, 3 + 1.963), abs=2e-3)  # 2.776 * sqrt(2.5) / sqrt(5)
