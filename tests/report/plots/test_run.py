"""The charts of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_kl.report.plots.run import run_charts
from rlhf_kl.report.run import read_run


def test_the_share_of_kl_that_is_bought_has_a_chart_where_it_is_known(
    write_run: Callable[..., Path], metrics_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    rows = metrics_rows([0.0, 0.05, 0.1, 0.1])
    for row, share in zip(rows, [None, 0.25, 0.5, 0.75], strict=False):
        row["kl/bought"] = share
    [chart] = [chart for chart in run_charts(read_run(write_run("new", rows))) if chart.slug == "bought"]
    assert [place.x for place in chart.places] == [2.0, 3.0, 4.0]
    assert ["0.250" in place.text for place in chart.places] == [True, False, False]
    for row in rows:  # as earlier versions wrote them
        row.pop("kl/bought", None)
    assert "bought" not in [chart.slug for chart in run_charts(read_run(write_run("old", rows)))]
