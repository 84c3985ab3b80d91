"""`rlhf-kl compare`: train variants x seeds or read finished runs; table, pictures, page, verdict."""

from __future__ import annotations

from pathlib import Path

from rlhf_kl.commands.grid import Failure, Grid, check_folders, check_links
from rlhf_kl.config.compare import ComparePlan
from rlhf_kl.errors import InputError
from rlhf_kl.report.charts import compare_charts, held_charts, held_columns
from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.drawing import save_sheet
from rlhf_kl.report.frontier import frontier_charts
from rlhf_kl.report.page import compare_page
from rlhf_kl.report.verdict import COLUMNS, judge, text_table, variant_rows
from rlhf_kl.run.folder import check_no_links, write_atomic
from rlhf_kl.run.log import write_json
from rlhf_kl.run.signals import ending_on_sigterm
from rlhf_kl.text import hanging

PAGES = ("compare.json", "compare.html", "compare.png")


def train_grid(plan: ComparePlan, *, jobs: int, overwrite: bool) -> list[Failure]:
    """Train the missing runs. Errors: InputError if a folder holds another run, or a file to write is a link."""
    check_links(plan, PAGES)
    if not overwrite:
        check_folders(plan)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{plan.folder} cannot be created: {error.strerror}") from None
    with ending_on_sigterm():
        return Grid(plan, jobs, overwrite).work()


def planned_comparison(plan: ComparePlan) -> Comparison:
    """The runs of a plan that have been started, with the names that the plan gives them."""
    names = {Path(run.config.run.output_dir): run.variant for run in plan.runs}
    started = {path: name for path, name in names.items() if (path / "config.yaml").is_file()}
    if not started:
        raise InputError(f"{plan.folder}: none of the runs has started")
    comparison = read_comparison(list(started), started)
    return Comparison(comparison.variants, [*plan.notes, *comparison.notes])


def write_comparison(comparison: Comparison, folder: Path, name: str, width: int | None = None) -> str:
    """Write compare.json, compare.html and pictures into `folder`; return text for a terminal of `width` columns."""
    lines = judge(comparison)
    pictures = [*compare_charts(comparison), *frontier_charts(comparison)]
    check_no_links(folder / name for name in (*PAGES, *(f"{chart.slug}.png" for chart in pictures)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "compare.json", comparison.to_json(lines))
        write_atomic(folder / "compare.html", compare_page(comparison, name, lines))
        save_sheet(held_charts(comparison), folder / "compare.png", columns=held_columns(comparison),
                   heading=_heading(comparison, name), footer="Lines: seeds. Band: target ± 25 %.")  # fmt: skip
        for chart in pictures:
            save_sheet([chart], folder / f"{chart.slug}.png")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    verdict = "\n".join(hanging(line, width, 2) for line in lines)
    return "\n\n".join([text_table(COLUMNS, variant_rows(comparison)), verdict, str(folder / "compare.html")])


def _heading(comparison: Comparison, name: str) -> str:
    target = f": KL against its target, {comparison.target:g} nats per {comparison.unit}" if comparison.target else ""
    return f"{name}{target}"
