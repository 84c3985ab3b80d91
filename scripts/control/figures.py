"""Finished runs and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rlhf_kl.config.compare import PlannedRun
from rlhf_kl.report.run import RunResult, read_run
from rlhf_kl.run.figures import read_number


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


def started(planned: PlannedRun) -> RunResult | None:
    """What there is of a run; None where it has not started."""
    folder = Path(planned.config.run.output_dir)
    return read_run(folder) if (folder / "config.yaml").is_file() else None


def is_whole(planned: PlannedRun, run: RunResult) -> bool:
    """Whether a run has come to its end with all its updates."""
    return run.status == "finished" and len(run.updates) == planned.config.updates


def read_results(rows: dict[str, list[PlannedRun]]) -> tuple[Results, list[str]]:
    """The finished runs of each row, and a line for each other run."""
    results: Results = {row: [] for row in rows}
    missing = []
    for row, runs in rows.items():
        for planned in runs:
            run = started(planned)
            if run is None:
                missing.append(f"{planned.name}: has not started")
            elif is_whole(planned, run):
                results[row].append(Result(planned.config.kl.controller.coef, run))
            else:
                missing.append(f"{planned.name}: {'; '.join(run.notes)}")
    return results, missing


def starting_betas(results: Results) -> Sequence[float | str]:
    """In order, "auto" last."""
    betas = {result.beta for runs in results.values() for result in runs}
    return sorted(betas, key=lambda beta: (isinstance(beta, str), beta))
