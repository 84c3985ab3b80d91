"""The page of a comparison."""

from __future__ import annotations

from typing import Any

from rlhf_kl.report import control
from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.pages.render import chart_values, render_page
from rlhf_kl.report.plots.compare import compare_charts, held_charts
from rlhf_kl.report.plots.frontier import frontier_charts
from rlhf_kl.report.plots.targets import target_charts
from rlhf_kl.report.plots.variants import variant_styles
from rlhf_kl.report.table import COLUMNS, equal_kl_rows, variant_rows
from rlhf_kl.run.figures import format_number, format_percent
from rlhf_kl.run.text import safe_text

RUN_COLUMNS = (
    *("run", "seed", "status", "updates", "tail error", "in band", "peak", "cut", "KL", "beta", "score", "gold"),
    *("perplexity", "settled"),
)


def compare_page(comparison: Comparison, name: str, verdict: list[str]) -> str:
    """The comparison as one HTML text."""
    styles = variant_styles(comparison)
    return render_page(
        "compare.html",
        name=safe_text(name),
        subtitle=_subtitle(comparison),
        verdict=[safe_text(line) for line in verdict],
        missing=[safe_text(note) for note in comparison.notes],
        held=[chart_values(chart) for chart in held_charts(comparison)],
        columns=COLUMNS,
        rows=variant_rows(comparison),
        swatches=[styles[variant.name].tint for variant in comparison.variants],
        rows_note="Means over seeds ± one standard deviation. Tail error: mean |KL/target - 1| of the second half. "
        f"In band: share of the updates from {control.BAND_FROM} on within ±25 % of the target. Peak: largest "
        f"KL/target. KL, score and gold: the last {control.END} updates. Perplexity: held-out "
        "texts at the end; cost: over that at the start.",
        equal_kl=equal_kl_rows(comparison.equal_kl),
        charts=[chart_values(chart) for chart in compare_charts(comparison)],
        frontier=[chart_values(chart) for chart in (*target_charts(comparison), *frontier_charts(comparison))],
        run_columns=RUN_COLUMNS,
        runs=_run_rows(comparison),
    )


def _subtitle(comparison: Comparison) -> str:
    runs = sum(len(variant.runs) for variant in comparison.variants)
    parts = [f"{len(comparison.variants)} variants", f"{len(comparison.seeds)} seeds", f"{runs} runs"]
    if comparison.target is not None:
        parts.append(f"KL target {comparison.target:g} nats per {comparison.unit}")
    return " · ".join(parts)


def _run_rows(comparison: Comparison) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for run in (run for variant in comparison.variants for run in variant.runs.values()):
        figures = run.figures
        ends = (figures.kl, figures.beta, figures.scores, figures.gold, figures.perplexity)
        rows.append(
            [
                *(safe_text(run.path.name), run.seed, run.status, len(run.updates), format_number(figures.tail_error)),
                *(format_percent(figures.time_in_band), f"{format_number(figures.peak, 2)}x"),
                *(format_percent(figures.cut), *map(format_number, ends)),
                {True: "yes", False: "no", None: "-"}[figures.settled],
            ]
        )
    return rows
