"""What the charts against KL draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from matplotlib.figure import Figure

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.plots.frontier import frontier_charts

Grid = Callable[..., Comparison]
ENDS = {
    "adaptive": ("adaptive", 0.2, 0.1),
    "static-0.1x": ("fixed", 0.02, 0.4),
    "static-10x": ("fixed", 2.0, 0.01),
}


def test_the_curve_of_the_comparison_is_drawn(grid: Grid) -> None:
    """Gains of sqrt(KL) cubed bend upward: a straight line between the two ends of static would lie above them."""
    chart = frontier_charts(grid(ENDS, seeds=1, gain=lambda x: x**3 / 10))[0]
    assert "comparison at equal KL" in chart.caption
    axes = Figure().subplots()
    chart.draw(axes)
    (line,) = [line for line in axes.lines if len(line.get_xdata()) > 3]
    points = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert points[0.0] == 0.0
    low, high = math.sqrt(20 * 0.01), math.sqrt(20 * 0.4)
    assert max(points) == pytest.approx(high)
    assert points[max(points)] == pytest.approx(high**3 / 10)
    middle = min(points, key=lambda x: abs(x - (low + high) / 2))
    straight = (low**3 + (high**3 - low**3) * (middle - low) / (high - low)) / 10
    assert middle**3 / 10 < points[middle] < straight - 0.05


def test_runs_at_one_kl_have_no_curve(grid: Grid) -> None:
    chart = frontier_charts(grid({"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.1)}, seeds=1))[0]
    assert "comparison at equal KL" not in chart.caption
