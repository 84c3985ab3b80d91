"""The pages of `rlhf-kl report` and `rlhf-kl compare`, and the pictures beside them."""

from __future__ import annotations

import time
from pathlib import Path

from rlhf_kl import ui
from rlhf_kl.config.compare import ComparePlan
from rlhf_kl.errors import InputError
from rlhf_kl.report.charts import run_charts
from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.drawing import save_sheet
from rlhf_kl.report.page import report_page
from rlhf_kl.report.run import RunResult, read_run
from rlhf_kl.run.folder import RunFolder, write_atomic


def write_report(path: Path, refresh: int | None = None) -> RunResult:
    """Read the run at `path` and write its report.html and report.png. Errors: InputError."""
    run, folder = read_run(path), RunFolder(path)
    write_atomic(run.report, report_page(run, refresh if run.status == "unfinished" else None))
    if charts := run_charts(run):
        save_sheet(charts, folder.picture, columns=2, heading=run.name)
    return run


def watch_reports(paths: list[Path], seconds: int) -> None:
    """Write the reports every `seconds` until all runs have ended."""
    waiting = list(paths)
    while waiting:
        waiting = [path for path in waiting if write_report(path, refresh=seconds).status == "unfinished"]
        if waiting:
            time.sleep(seconds)


def planned_comparison(plan: ComparePlan) -> Comparison:
    """The runs of a plan that have been started, with the names that the plan gives them."""
    names = {Path(run.config.run.output_dir): run.variant for run in plan.runs}
    started = {path: name for path, name in names.items() if (path / "config.yaml").is_file()}
    if not started:
        raise InputError(f"{plan.folder}: none of the runs has started")
    comparison = read_comparison(list(started), started)
    return Comparison(comparison.variants, [*plan.notes, *comparison.notes], plan.options)


def link_reports(comparison: Comparison) -> None:
    """Write the page of each run that has none, or one older than its rows."""
    runs = [run for variant in comparison.variants for run in variant.runs.values()]
    old = [run for run in runs if _age(run.report) < _age(RunFolder(run.path).metrics) or not run.report.is_file()]
    with ui.progress("the pages of the runs", len(old)) as advance:
        for run in old:
            write_atomic(run.report, report_page(run))
            advance()


def _age(file: Path) -> float:
    return file.stat().st_mtime if file.is_file() else 0.0
