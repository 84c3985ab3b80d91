"""`rlhf-kl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_kl import ui
from rlhf_kl.cli.options import Overwrite, Quiet, Set
from rlhf_kl.errors import InputError
from rlhf_kl.text import stdout_width

if TYPE_CHECKING:
    from rlhf_kl.ui import log


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Finished runs, or folders of comparisons.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Variants and seeds to train and compare.")
    ] = None,
    set_: Set = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="Folder of the result (default: runs/NAME or runs/compare)."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Only this seed, instead of those in the file.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Parallel runs, which share the cores.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder (the default).")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> int:
    """Train variants x seeds, or read finished runs: table, pictures and a verdict."""
    if (config is None) == (not runs):
        raise InputError("compare takes --config FILE to train, or RUN folders to read")
    if config is None and (set_ or seed is not None or overwrite or resume or jobs != 1):
        raise InputError("--set, --seed, --jobs, --resume and --overwrite need --config: RUN folders are only read")
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: choose one")

    ui.start(quiet)
    if config is None:
        return _read(runs or [], output_dir or Path("runs/compare"))
    return _train(config, set_ or [], output_dir, seed, jobs, overwrite)


def _read(runs: list[Path], folder: Path) -> int:
    from rlhf_kl.commands.compare import write_comparison
    from rlhf_kl.report.compare import read_comparison

    with ui.waiting("reading the runs"):
        comparison = read_comparison(runs)
    _show_notes(comparison.notes)
    with ui.waiting("drawing the comparison"):
        text = write_comparison(comparison, folder, folder.name, stdout_width())
    print(text)
    return 0


def _train(
    config: str,
    sets: list[str],
    output_dir: Path | None,
    seed: int | None,
    jobs: int,
    overwrite: bool,
) -> int:
    from rlhf_kl.config.compare import check_variants, load_compare

    plan = load_compare(config, sets, output_dir, seed)  # errors of the config come before torch is imported
    check_variants(plan)
    from rlhf_kl.commands.compare import planned_comparison, train_grid, write_comparison

    failures = train_grid(plan, jobs=jobs, overwrite=overwrite)
    with ui.waiting("reading the runs"):
        comparison = planned_comparison(plan)
    _show_notes(comparison.notes)
    with ui.waiting("drawing the comparison"):
        text = write_comparison(comparison, plan.folder, plan.name, stdout_width())
    print(text)
    return 1 if failures else 0


def _show_notes(notes: list[str]) -> None:
    for note in notes:
        log.info(f"note: {note}")
