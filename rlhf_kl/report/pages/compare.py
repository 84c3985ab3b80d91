"""The page of a comparison."""

from __future__ import annotations

from typing import Any

from rlhf_kl.report import control
from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.pages.render import chart_values, render_page
from rlhf_kl.report.plots.compare import compare_charts, frontier_charts, held_charts, looks
from rlhf_kl.report.table import COLUMNS, equal_rows, rows
from rlhf_kl.report.text import percent, shown
from rlhf_kl.run.text import safe_text

RUN_COLUMNS = (
    "run",
    "seed",
    "status",
    "updates",
    "tail error",
    "in band",
    "peak",
    "cut",
    "KL",
    "beta",
    "score",
    "gold",
    "perplexity",
    "settled",
)


def compare_page(comparison: Comparison, name: str, verdict: list[str]) -> str:
    """The comparison as one HTML text."""
    look = looks(comparison)
    held = held_charts(comparison)
    return render_page(
        "compare.html",
        name=safe_text(name),
        subtitle=_subtitle(comparison),
        verdict=[safe_text(line) for line in verdict],
        missing=[safe_text(note) for note in comparison.notes],
        held=[chart_values(chart) | {"caption": chart.subtitle} for chart in held],
        columns=COLUMNS,
        table=[{"cells": row, "colour": look[row[0]].colour} for row in rows(comparison)],
        table_note="Means over seeds ± one standard deviation. Tail error: mean |KL/target - 1| of the second half. "
        f"In band: share of the updates from {control.BAND_FROM} on within ±25 % of the target. Peak: largest "
        f"KL/target. KL, score and gold: the last {control.END} updates. Perplexity: held-out "
        "texts at the end; cost: over that at the start.",
        equal=equal_rows(comparison.equal_kl),
        charts=[chart_values(chart) for chart in compare_charts(comparison)],
        frontier=[chart_values(chart) for chart in frontier_charts(comparison)],
        run_columns=RUN_COLUMNS,
        runs=_runs(comparison),
    )


def _subtitle(comparison: Comparison) -> str:
    runs = sum(len(variant.runs) for variant in comparison.variants)
    target = f"KL target {comparison.target:g} nats per {comparison.unit}" if comparison.target is not None else ""
    parts = [f"{len(comparison.variants)} variants", f"{len(comparison.seeds)} seeds", f"{runs} runs", target]
    return " · ".join(part for part in parts if part)


def _runs(comparison: Comparison) -> list[list[Any]]:
    table = []
    for variant in comparison.variants:
        for seed, run in variant.runs.items():
            found = variant.figures[seed]
            settled = {True: "yes", False: "no", None: "-"}[found.settled]
            table.append(
                [
                    safe_text(run.path.name), seed, run.status, len(run.updates), shown(found.tail_error),
                    percent(found.time_in_band), f"{shown(found.peak, 2)}x", percent(found.cut), shown(found.kl),
                    shown(found.beta), shown(found.scores), shown(found.gold), shown(found.perplexity), settled,
                ]
            )  # fmt: skip
    return table
