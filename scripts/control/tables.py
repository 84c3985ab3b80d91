"""Tables of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from control.figures import Reduce, Results, over_runs, starting_betas
from control.reach import Reach
from control.rows import is_stress
from rlhf_kl.report.table import text_table
from rlhf_kl.run.figures import format_number, format_percent


def by_row(results: Results, asked: Mapping[str, int], reach: Mapping[str, Reach]) -> str:
    """One line a row: means over its runs, and the worst where the header names it.

    With a stress row also the lowest tail error of any constant beta.
    """
    stress = any(map(is_stress, results))
    header = ("", "runs", "tail error", "worst", *(["reachable"] if stress else []), "peak", "worst", "in band",
              "worst", "sd log beta", "cut", "score", "gold", "KL", "of limit")  # fmt: skip
    columns: list[tuple[Callable[[float | None], str], str, Reduce]] = [
        (format_number, "tail_error", fmean), (format_number, "tail_error", max),
        (format_number, "peak", fmean), (format_number, "peak", max),
        (format_percent, "time_in_band", fmean), (format_percent, "time_in_band", min),
        (format_number, "log_beta_sd", fmean), (format_percent, "cut", fmean),
        (format_number, "scores_shaped", fmean), (format_number, "gold", fmean),
        (format_number, "kl", fmean), (format_percent, "of_limit", fmean),
    ]  # fmt: skip
    body = []
    for row, runs in results.items():
        cells = [row, f"{len(runs)}/{asked[row]}"]
        cells += [show(over_runs(runs, key, reduce)) for show, key, reduce in columns]
        if stress:
            cells.insert(header.index("reachable"), str(reach[row]) if row in reach else "-")
        body.append(cells)
    return text_table(header, body)


def by_beta(results: Results) -> str:
    """Tail error, and in brackets the peak, by row and starting beta; means over the seeds."""
    betas = starting_betas(results)
    body = []
    for row, runs in results.items():
        cells = [row]
        for beta in betas:
            same = [result for result in runs if result.beta == beta]
            tail, peak = over_runs(same, "tail_error"), over_runs(same, "peak")
            cells.append(f"{format_number(tail)} ({format_number(peak)}x)" if same else "-")
        body.append(cells)
    return text_table(("tail error (peak) from beta", *map(str, betas)), body)
