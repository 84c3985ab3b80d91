"""Finished runs of the rows: their figures, tables, charts, and the goals of `adaptive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import NamedTuple

from control.reach import Reach
from control.rows import is_complete, is_stress, started
from rlhf_kl.config.compare import PlannedRun
from rlhf_kl.report.charts import ratio_chart
from rlhf_kl.report.drawing import ORDERED, Chart
from rlhf_kl.report.run import RunResult
from rlhf_kl.report.verdict import text_table
from rlhf_kl.text import format_number, format_percent, read_number


class Result(NamedTuple):
    """A finished run of a row."""

    beta: float | str  # that it started from, or "auto"
    run: RunResult

    @property
    def figures(self) -> dict[str, float | None]:
        return asdict(self.run.figures) | {"of_limit": read_number(self.run.summary, "tilt_share")}


Reduce = Callable[[list[float]], float]
Results = dict[str, list[Result]]  # by row


def over_runs(results: Iterable[Result], key: str, reduce: Reduce = fmean) -> float | None:
    """A figure of several runs as one; None where a run has none."""
    values = [result.figures[key] for result in results]
    known = [value for value in values if value is not None]
    return reduce(known) if known and len(known) == len(values) else None


def read_results(rows: dict[str, list[PlannedRun]]) -> tuple[Results, list[str]]:
    """The finished runs of each row, and a line for each other run."""
    results: Results = {row: [] for row in rows}
    missing = []
    for row, runs in rows.items():
        for planned in runs:
            run = started(planned)
            if run is None:
                missing.append(f"{planned.name}: has not started")
            elif is_complete(planned, run):
                results[row].append(Result(planned.config.kl.controller.coef, run))
            else:
                missing.append(f"{planned.name}: {'; '.join(run.notes)}")
    return results, missing


def starting_betas(results: Results) -> Sequence[float | str]:
    """In order, "auto" last."""
    betas = {result.beta for runs in results.values() for result in runs}
    return sorted(betas, key=lambda beta: (isinstance(beta, str), beta))


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


def charts(results: Results) -> list[Chart]:
    """KL / target over the updates, one chart a row, coloured by starting beta."""
    betas = starting_betas(results)
    tints = {beta: ORDERED[(2 * i) % len(ORDERED)] for i, beta in enumerate(betas)}
    return [_chart(row, runs, tints) for row, runs in results.items()]


def _chart(row: str, runs: Sequence[Result], tints: dict[float | str, str]) -> Chart:
    first = dict(reversed(runs))  # the names of the starting betas stand there once
    curves = [(run, tints[beta], str(beta) if first[beta] is run else "") for beta, run in runs]
    return ratio_chart(row, row, curves, f"tail error {format_number(over_runs(runs, 'tail_error'), 2)}")


class Goal(NamedTuple):
    """One promise of the default controller."""

    text: str
    key: str
    reduce: Reduce
    limit: float
    at_least: bool = False

    def verdict(self, results: Sequence[Result], asked: int) -> str:
        """met or MISSED; open while runs are missing."""
        value = over_runs(results, self.key, self.reduce)
        if value is None or len(results) < asked:
            return "open"
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "MISSED"

    def line(self, results: Sequence[Result], asked: int) -> str:
        """The verdict, and the figure that it is about."""
        shown = format_number(over_runs(results, self.key, self.reduce))
        side = "at least" if self.at_least else "at most"
        return f"  {self.verdict(results, asked):<7} {self.text:<42} {shown:>7}   ({side} {self.limit:.2f})"


GOAL_RUNS = 9
GOALS = (
    Goal("tail error, mean of the runs", "tail_error", fmean, 0.08),
    Goal("tail error, worst run", "tail_error", max, 0.15),
    Goal("peak KL/target, worst run", "peak", max, 1.6),
    Goal("in band, mean of the runs", "time_in_band", fmean, 0.90, at_least=True),
    Goal("cut by the ceiling, mean of the runs", "cut", fmean, 0.20),
)
STRESS_GOALS = (
    Goal("tail error, mean of the runs", "tail_error", fmean, 0.06),
    Goal("tail error, worst run", "tail_error", max, 0.15),
)
STRESS_PEAK = Goal("peak KL/target, worst run with a ceiling", "peak", max, 1.6)


def goal_lines(results: Sequence[Result], asked: int) -> list[str]:
    """Which goals `adaptive` meets, one per line."""
    lines = [f"Goals of `adaptive` ({len(results)} of {asked} runs):"]
    lines += [goal.line(results, asked) for goal in GOALS]
    if asked < GOAL_RUNS:
        lines.append(f"  note: the goals are for {GOAL_RUNS} runs, three seeds x three starting betas")
    return lines


def stress_lines(results: Results, asked: Mapping[str, int], reach: Mapping[str, Reach]) -> list[str]:
    """Which goals the stress rows meet that some constant beta can hold; one of unknown reach counts."""
    rows = [row for row in results if is_stress(row)]
    left_out = [row for row in rows if row in reach and not reach[row].reachable]
    counted = [row for row in rows if row not in left_out]
    runs = [run for row in counted for run in results[row]]
    number = sum(asked[row] for row in counted)
    bounded = [run for run in runs if run.run.config.kl.ceiling is not None]
    lines = [f"Goals of the stress rows ({len(runs)} of {number} runs of {len(counted)} rows):"]
    lines += [goal.line(runs, number) for goal in STRESS_GOALS]
    lines.append(STRESS_PEAK.line(bounded, len(bounded) + number - len(runs)))
    if left_out:
        lines.append(f"  left out, as no constant beta holds the target: {', '.join(left_out)}")
    if unknown := [row for row in counted if row not in reach]:
        lines.append(f"  note: --reach has not been run for {', '.join(unknown)}")
    return lines
