"""The goals of `adaptive`, and whether runs reach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from control.figures import Reduce, Result, Results, over_runs
from control.reach import Reach
from control.rows import is_stress
from rlhf_kl.run.figures import format_number


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
