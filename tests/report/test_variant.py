from __future__ import annotations

import math

import pytest

from rlhf_kl.report.variant import over_seeds


def test_curves_over_seeds_end_where_the_shortest_does() -> None:
    x, mean, low, high = over_seeds([([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), ([1.0, 2.0], [3.0, 2.0])])
    assert (x, mean) == ([1.0, 2.0], [2.0, 2.0])
    assert (low[0], high[1]) == (pytest.approx(2 - math.sqrt(2)), 2.0)
