"""KL over the updates, a panel a row."""

from __future__ import annotations

from collections.abc import Sequence

from control.figures import Result, Results, over_runs, starting_betas
from rlhf_kl.report.plots.chart import UPDATE, Axes, Chart, plot_line, plot_target
from rlhf_kl.report.plots.compare import TOP
from rlhf_kl.report.plots.style import ORDERED
from rlhf_kl.run.figures import format_number


def charts(results: Results) -> list[Chart]:
    """KL / target over the updates, one chart a row, coloured by starting beta."""
    betas = starting_betas(results)
    tints = {beta: ORDERED[(2 * i) % len(ORDERED)] for i, beta in enumerate(betas)}
    return [_chart(row, runs, tints) for row, runs in results.items()]


def _chart(row: str, runs: Sequence[Result], tints: dict[float | str, str]) -> Chart:
    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel="KL / target", ylim=(0.0, TOP))
        plot_target(axes, 1.0, label="")
        named: set[float | str] = set()
        for beta, run in runs:
            ratios = [min(ratio, 1.5 * TOP) for ratio in run.ratios]
            label = "" if beta in named else str(beta)
            plot_line(axes, range(1, len(ratios) + 1), ratios, tints[beta], linewidth=1.1, label=label)
            named.add(beta)

    highest = over_runs(runs, "peak", max) or 0.0
    subtitle = f"tail error {format_number(over_runs(runs, 'tail_error'), 2)}"
    subtitle += f", up to {format_number(highest, 2)}x" if highest > TOP else ""
    return Chart(row, row, draw, subtitle=subtitle)
