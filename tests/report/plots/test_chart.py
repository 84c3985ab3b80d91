from __future__ import annotations

from rlhf_kl.report.plots.chart import columns, thin


def test_long_lines_become_means_of_stretches() -> None:
    values = [float(i) for i in range(1000)]
    shorter = thin(values)
    assert len(shorter) == 334
    assert shorter[:2] == [1.0, 4.0]  # of 0, 1, 2 and of 3, 4, 5
    assert thin(values[:400]) == values[:400]


def test_columns_to_point_at() -> None:
    curves = [("a", [1.0, 2.0], [0.5, 0.25]), ("b", [2.0, 3.0], [1.0, 2.0])]
    assert columns("update", curves, [(2.2, "kl-spike")]) == [
        (1.0, None, "update 1: a 0.500"),
        (2.0, None, "update 2: a 0.250, b 1.00, kl-spike"),
        (3.0, None, "update 3: b 2.00"),
    ]
