"""Policies side by side, of a comparison or of one scaled run: their JSON, page, pictures and text."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlhf_kl import ui
from rlhf_kl.control import verdict as rule
from rlhf_kl.report import token_tables
from rlhf_kl.report.charts import KL_OVER_TARGET, compare_charts, held_charts, target_charts, variant_styles
from rlhf_kl.report.comparison import Comparison
from rlhf_kl.report.drawing import Chart, save_sheet
from rlhf_kl.report.page import render, render_chart, report_page, response_figures
from rlhf_kl.report.sentences import WIDTH, figures_table, judge
from rlhf_kl.report.sweep import asked_of, scale_table, scaled_answer, sweep_of, sweep_of_scaled
from rlhf_kl.report.texts import across
from rlhf_kl.run.folder import RunFolder, write_atomic
from rlhf_kl.run.log import write_json
from rlhf_kl.shell import short_path
from rlhf_kl.text import cut, hanging, safe_text, text_table

PROMPT = 160  # characters of a prompt that are shown, its end

Sections = Sequence[tuple[str, Sequence[Chart], str]]  # title, charts, name of their picture (empty: one for each)


def write_comparison(comparison: Comparison, folder: Path, name: str, width: int | None = None) -> str:
    """Write compare.json, compare.html and pictures into `folder`; return text for a terminal of `width` columns."""
    _link_reports(comparison)
    verdict = judge(comparison)
    runs = [(variant.name, seed, run) for variant in comparison.variants for seed, run in variant.runs.items()]
    counts = {"variant": len(comparison.variants), "seed": len(comparison.seeds), "run": len(runs)}
    subtitle = " · ".join(f"{count} {thing}{'s' * (count > 1)}" for thing, count in counts.items())
    if comparison.target is not None:
        subtitle += f" · KL target {comparison.target:g} nats per {comparison.unit}"
    links: dict[str, list[tuple[int, str]]] = {}
    for variant, seed, run in runs:
        if run.report.is_file():
            links.setdefault(variant, []).append((seed, quote(os.path.relpath(run.report, folder))))
    sections = [
        ("What each target costs", target_charts(sweep_of(comparison)), "targets.png"),
        (KL_OVER_TARGET, held_charts(comparison), "compare.png"),
        ("Scores and costs", compare_charts(comparison), ""),
    ]
    return _write(
        folder / "compare",
        comparison.to_json(verdict),
        sections,
        width,
        name=name,
        subtitle=subtitle,
        verdict=verdict,
        table=figures_table(comparison),
        texts_title="The same prompt",
        texts=_compared_texts(comparison),
        notes=comparison.notes,
        tints={name: style.tint for name, style in variant_styles(comparison).items()},
        links=links,
        shares={variant.name: variant.kl_shares for variant in comparison.variants},
    )


def _link_reports(comparison: Comparison) -> None:
    """Write the page of each run that has none, or one older than its rows."""
    runs = [run for variant in comparison.variants for run in variant.runs.values()]
    old = [run for run in runs if _age(run.report) < _age(RunFolder(run.path).metrics) or not run.report.is_file()]
    with ui.progress("the pages of the runs", len(old)) as advance:
        for run in old:
            write_atomic(run.report, report_page(run))
            advance()


def _age(file: Path) -> float:
    return file.stat().st_mtime if file.is_file() else 0.0


def write_scaled(document: Mapping[str, Any], folder: RunFolder, name: str, width: int | None) -> str:
    """Write scale.json, scale.html and scale.png into a run's folder; return text for a terminal."""
    scored = document["reference"]["scores"] is not None
    texts = [
        (
            f"KL target {row['target']:g} (scale {row['scale']:.2f})",
            [(cut(text["prompt"].strip(), -PROMPT), response_figures(text), text["text"]) for text in row["texts"]],
        )
        for row in document["rows"]
    ]
    return _write(
        folder.path / "scale",
        document,
        [("Which target?", target_charts(sweep_of_scaled(document)), "scale.png")],
        width,
        name=f"{name}, scaled",
        subtitle=f"One run at other KL targets · {asked_of(document)} at each",
        verdict=scaled_answer(document, shlex.quote(short_path(str(folder.path)))),
        table=scale_table(document),
        texts_title=f"Two responses{' of median score' * scored} at each target",
        texts=texts,
        notes=(),
        tints={},
        links={},
        shares={},
    )


def _write(stem: Path, document: Mapping[str, Any], sections: Sections, width: int | None, **shown: Any) -> str:
    """Write stem.json, stem.html and the pictures beside it; returns text for a terminal of `width` columns.

    shown: for the template; of `texts` a heading, and for each text who or what, figures and the text.
    """
    folder, page = stem.parent, stem.with_suffix(".html")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(stem.with_suffix(".json"), dict(document))
    drawn = [(title, [render_chart(chart) for chart in charts]) for title, charts, _ in sections]
    write_atomic(
        page,
        render("compare.html", kind=stem.name, rule=rule, tables=token_tables, sections=drawn, refresh=None, **shown),
    )
    for title, charts, picture in sections:
        if picture and charts:
            save_sheet(charts, folder / picture, heading=title)
        for chart in charts if not picture else ():
            save_sheet([chart], folder / f"{chart.slug}.png")
    header, rows = shown["table"]
    parts = ["\n".join(hanging(line, width, 2) for line in shown["verdict"])]
    parts.append(text_table(header, rows, width or WIDTH))
    for heading, texts in shown["texts"]:
        lines = [heading, *(f"{who} ({figures}): {' '.join(text.split())}" for who, figures, text in texts)]
        parts.append("\n".join(hanging(safe_text(line), width, 2) for line in lines))
    return "\n\n".join([*parts, short_path(str(page))])


def _compared_texts(comparison: Comparison) -> list[Any]:
    """A held-out prompt, answered by the reference and each variant's first seed; empty where they share none."""
    found = across({v.name: next(iter(v.runs.values())).path for v in comparison.variants})
    if found is None:
        return []
    answers = {"reference": found["reference"], **found["policies"]}
    return [(found["prompt"], [(name, response_figures(text), text["text"]) for name, text in answers.items()])]
