"""The commands that show runs: `compare`, which may train them first, and `report`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zlib import crc32

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Overwrite, Quiet, Set, Updates, check_updates, local
from rlhf_kl.errors import InputError
from rlhf_kl.text import stdout_width
from rlhf_kl.ui import log

if TYPE_CHECKING:
    from rlhf_kl.config.variants import ComparePlan


Runs = Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="Finished runs, or folders of comparisons.")]
Variants = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="Variants and seeds to train and compare.")
]
ResultDir = Annotated[
    Path | None,
    typer.Option(
        "--output-dir", metavar="DIR", callback=local, help="Of the result (default: runs/NAME, or runs/compare/RUNS)."
    ),
]
OneSeed = Annotated[
    int | None, typer.Option("--seed", metavar="N", min=0, help="Only this seed, instead of those in the file.")
]
Jobs = Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Parallel runs, which share the cores.")]
GoOn = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder (the default).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print compare.json instead.")]


def compare(
    runs: Runs = None,
    config: Variants = None,
    set_: Set = None,
    output_dir: ResultDir = None,
    seed: OneSeed = None,
    updates: Updates = None,
    jobs: Jobs = 1,
    resume: GoOn = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Train variants x seeds, or read finished runs: table, pictures and a verdict."""
    if (config is None) == (not runs):
        raise InputError("compare takes --config FILE to train, or RUN folders to read")
    if config is None and (set_ or updates or seed is not None or overwrite or resume or jobs != 1):
        options = "--set, --seed, --updates, --jobs, --resume and --overwrite"
        raise InputError(f"{options} need --config: RUN folders are only read")
    check_updates(updates, set_)
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: choose one")
    ui.start(quiet)
    plan: ComparePlan | None = None
    if config is not None:
        from rlhf_kl.config.variants import check_variants, load_compare

        # Errors of the config come before torch is imported.
        plan = load_compare(config, set_ or [], output_dir, seed, updates=updates)
        check_variants(plan)
    from rlhf_kl.commands.grid import planned_comparison, train_grid
    from rlhf_kl.report.comparison import read_comparison
    from rlhf_kl.report.side_by_side import write_comparison

    failures = train_grid(plan, jobs=jobs, overwrite=overwrite) if plan else []
    with ui.progress("reading the runs"):
        comparison = planned_comparison(plan) if plan else read_comparison(runs or [])
    for note in comparison.notes:
        log.info(f"note: {note}")
    paths = sorted({str(run.resolve()) for run in runs or []})  # other runs, another page
    name = f"{'+'.join(Path(path).name for path in paths)[:100]}-{crc32(repr(paths).encode()):08x}"
    folder = plan.folder if plan else output_dir or Path("runs/compare") / name
    with ui.progress("drawing the comparison"):
        text = write_comparison(comparison, folder, plan.name if plan else folder.name, stdout_width())
    print((folder / "compare.json").read_text(encoding="utf-8").rstrip() if as_json else text)
    return 1 if failures else 0


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders; default: the newest under runs/.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again while the run goes on.")] = False,
    every: Annotated[int, typer.Option(metavar="SECONDS", min=1, help="With --watch: how often.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures of each run, by folder.")] = False,
    quiet: Quiet = False,
) -> None:
    """Show a finished or running run as one self-contained page: RUN/report.html."""
    from rlhf_kl.report.page import write_report
    from rlhf_kl.run.folder import newest_run
    from rlhf_kl.run.log import encode_json

    ui.start(quiet)
    paths = runs or [newest_run()]
    going = list(paths) if watch else []
    while going := [path for path in going if write_report(path, refresh=every).status == "unfinished"]:
        time.sleep(every)
    figures = {}
    for path in paths:
        with ui.progress(f"drawing {path / 'report.html'}"):
            run = write_report(path)
        for note in run.notes:
            log.info(f"{path}: {note}")
        figures[str(path)] = run.figures | {"page": str(path / "report.html"), "status": run.status}
    print(
        encode_json(figures, indent=2).decode() if as_json else "\n".join(str(path / "report.html") for path in paths)
    )
