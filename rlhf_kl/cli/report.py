"""`rlhf-kl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_kl import ui
from rlhf_kl.cli.options import Quiet


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders; default: the newest under runs/.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again while the run goes on.")] = False,
    every: Annotated[int, typer.Option(metavar="SECONDS", min=1, help="With --watch: how often.")] = 10,
    quiet: Quiet = False,
) -> None:
    """Show a finished or running run as one self-contained page: RUN/report.html."""
    from rlhf_kl.commands.report import watch_reports, write_report
    from rlhf_kl.run.folder import newest_run
    from rlhf_kl.ui import log

    ui.start(quiet)
    paths = runs or [newest_run()]
    if watch:
        log.info(f"writing {', '.join(str(path / 'report.html') for path in paths)} every {every} s")
        watch_reports(paths, every)
    for path in paths:
        with ui.waiting(f"drawing {path / 'report.html'}"):
            notes = write_report(path).notes
        for note in notes:
            log.info(f"{path}: {note}")
        print(path / "report.html")
