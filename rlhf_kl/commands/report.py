"""The pages of `rlhf-kl report` and `rlhf-kl compare`, and the pictures beside them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.config.compare import ComparePlan
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.program import short_path
from rlhf_kl.report.charts import compare_charts, held_charts, run_charts, target_charts
from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.drawing import save_sheet
from rlhf_kl.report.page import compare_page, compared_texts, report_page, scale_page, scaled_texts
from rlhf_kl.report.run import RunResult, read_run
from rlhf_kl.report.sweep import recommend, scale_table, scaled_answer, sweep_of, sweep_of_scaled
from rlhf_kl.report.verdict import WIDTH, figures_table, judge, text_table
from rlhf_kl.run.folder import RunFolder, write_atomic
from rlhf_kl.run.log import write_json
from rlhf_kl.text import hanging, safe_text


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
    """Write the page of each run that has none, or one older than its rows; where that cannot be, there is no link."""
    runs = [run for variant in comparison.variants for run in variant.runs.values()]
    old = [run for run in runs if not run.report.is_file() or _age(run.report) < _age(RunFolder(run.path).metrics)]
    with ui.progress("the pages of the runs", len(old)) as advance:
        for run in old:
            with suppress(OSError):
                write_atomic(run.report, report_page(run))
            advance()


def write_scaled(document: Mapping[str, Any], folder: RunFolder, config: TrainConfig, width: int | None) -> str:
    """Write scale.json, scale.html and scale.png into a run's folder; return text for a terminal."""
    lines, name = scaled_answer(document, shlex.quote(short_path(str(folder.path)))), config.run.name
    charts = target_charts(sweep_of_scaled(document))
    write_json(folder.path / "scale.json", dict(document))
    write_atomic(folder.path / "scale.html", scale_page(document, name, lines))
    save_sheet(charts, folder.path / "scale.png", columns=2, heading=f"{name}: which target?")
    parts = [text_table(*scale_table(document), width or WIDTH)]
    for heading, answers in scaled_texts(document):
        texts = [f"  {prompt} ... {safe_text(text)}  ({figures})" for prompt, figures, text in answers]
        parts.append("\n".join([heading, *(hanging(text, width, 4) for text in texts)]))
    parts.append("\n".join(hanging(line, width, 2) for line in lines))
    return "\n\n".join([*parts, short_path(str(folder.path / "scale.html"))])


def _age(file: Path) -> float:
    return file.stat().st_mtime if file.is_file() else 0.0


def write_comparison(comparison: Comparison, folder: Path, name: str, width: int | None = None) -> str:
    """Write compare.json, compare.html and pictures into `folder`; return text for a terminal of `width` columns."""
    lines, held, sweep = judge(comparison), held_charts(comparison), sweep_of(comparison)
    advice = recommend(sweep) if len(comparison.seeds) > 1 else None
    target = f" of {comparison.target:g} nats per {comparison.unit}" if comparison.target else ""
    link_reports(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", comparison.to_json(lines, advice and advice.target))
    write_atomic(folder / "compare.html", compare_page(comparison, name, lines, folder))
    if held:
        footer = ("A line for each seed. " if len(comparison.seeds) > 1 else "") + "Band: target ± 25 %."
        save_sheet(held, folder / "compare.png", columns=2 if len(held) == 4 else min(3, len(held)),
                   heading=f"KL over its target{target}, by update", footer=footer)  # fmt: skip
    if targets := target_charts(sweep):
        save_sheet(targets, folder / "targets.png", columns=2, heading="Which target?")
    for chart in compare_charts(comparison):
        save_sheet([chart], folder / f"{chart.slug}.png")
    verdict = "\n".join(hanging(line, width, 2) for line in lines)
    parts = [verdict, text_table(*figures_table(comparison), width or WIDTH)]
    if texts := compared_texts(comparison):
        parts.append(
            "\n".join(
                hanging(f"{who} ({figures}): {safe_text(text)}", width, 2)
                for who, figures, text in [("prompt", "held out", texts[0]), *texts[1]]
            )
        )
    return "\n\n".join([*parts, short_path(str(folder / "compare.html"))])
