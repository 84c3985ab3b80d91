from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rlhf_kl.report.plots.chart import Chart, Line, Mark, hits, spread, thin


def test_labels_keep_their_order_and_their_distance() -> None:
    rng = random.Random(1)
    for _ in range(200):
        wanted = [rng.uniform(0, 100) for _ in range(rng.randint(1, 8))]
        places = spread(wanted, 10.0, 0.0, 100.0)
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert all(places[b] - places[a] >= 10.0 - 1e-9 for a, b in pairwise(order))
        assert min(places) >= -1e-9
        assert max(places) <= 100.0 + 1e-9


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([50.0, 10.0, 30.0], 10.0, 0.0, 100.0) == [50.0, 10.0, 30.0]
    assert spread([50.0, 50.0], 10.0, 0.0, 100.0) == pytest.approx([45.0, 55.0])


def test_long_lines_become_means_of_stretches() -> None:
    x = [float(i) for i in range(1000)]
    shorter, none = thin(x, None)
    assert none is None
    assert shorter is not None
    assert len(shorter) == 334
    assert shorter[0] == 1.0  # of 0, 1, 2
    assert thin(x[:400])[0] == x[:400]


def test_what_can_be_pointed_at() -> None:
    lines = [Line("a", [1, 2], [0.5, 0.25]), Line("b", [2, 3], [1.0, 2.0]), Line("", [1], [1])]
    chart = Chart("slug", "Title", "update", "y", lines, marks=[Mark(2.2, "kl-spike")])
    assert [(hit.text, hit.x, hit.y) for hit in hits(chart)] == [
        ("update 1: a 0.500", 1, None),
        ("update 2: a 0.250, b 1.00, kl-spike", 2, None),
        ("update 3: b 2.00", 3, None),
    ]
    points = Chart("slug", "Title", "x", "y", [*lines, Line("p", [5.0], [6.0], points=True)])
    assert [(hit.text, hit.x, hit.y) for hit in hits(points)] == [("p: 5.00, 6.00", 5.0, 6.0)]


def test_a_chart_without_points_is_empty() -> None:
    assert Chart("s", "t", "x", "y", [Line("a", [], [])]).empty
    assert not Chart("s", "t", "x", "y", [Line("a", [1], [1])]).empty
