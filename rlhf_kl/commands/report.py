"""`rlhf-kl report`: a run's page and its picture."""

from __future__ import annotations

import time
from pathlib import Path

from rlhf_kl.errors import InputError
from rlhf_kl.report.charts import run_charts
from rlhf_kl.report.drawing import save_sheet
from rlhf_kl.report.page import report_page
from rlhf_kl.report.run import RunResult, read_run
from rlhf_kl.run.folder import RunFolder, check_no_links, write_atomic


def write_report(path: Path, refresh: int | None = None) -> RunResult:
    """Read the run at `path` and write its report.html and report.png. Errors: InputError."""
    run = read_run(path)
    folder = RunFolder(path)
    check_no_links((folder.report, folder.picture))
    try:
        write_atomic(folder.report, report_page(run, refresh if run.status == "unfinished" else None))
        if charts := run_charts(run):
            save_sheet(charts, folder.picture, columns=2, heading=run.name)
    except OSError as error:
        raise InputError(f"{path}: the report cannot be written: {error.strerror or error}") from None
    return run


def watch_reports(paths: list[Path], seconds: int) -> None:
    """Write the reports every `seconds` until all runs have ended."""
    waiting = list(paths)
    while waiting:
        waiting = [path for path in waiting if write_report(path, refresh=seconds).status == "unfinished"]
        if waiting:
            time.sleep(seconds)
