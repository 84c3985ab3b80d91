"""Self-contained HTML pages of a run and of a comparison: one file, nothing fetched, all text of runs is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_kl.config.load import dump_config
from rlhf_kl.report import control
from rlhf_kl.report.charts import compare_charts, held_charts, run_charts, variant_styles
from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.drawing import Chart, css, svg
from rlhf_kl.report.run import RunResult
from rlhf_kl.report.verdict import COLUMNS, variant_rows
from rlhf_kl.text import format_number, format_percent, read_number, safe_text

HOTTEST = (0.5, 4.0)  # nats: lower and upper bound of the KL that gets the full colour
STRONGEST = 0.7  # opacity of the full colour: text must stay legible
TABLE_NOTE = (
    "Means over seeds ± one standard deviation. Tail error: mean |KL/target - 1| of the second half. In band: share of "
    f"the updates from {control.BAND_FROM} on within ±{control.BAND:.0%} of the target. Held: a tail error of at most "
    f"{control.HELD_ERROR:g} and {control.HELD_SHARE:.0%} in band, in every seed, with a beta that depends on the KL. "
    f"Peak: largest KL/target. KL, score and gold: the last {control.END} updates. Perplexity: held-out texts at the "
    "end; cost: over that at the start. The verdict compares scores at equal KL: by seed, read from a monotone cubic "
    "over √KL through the reference and the ends of a family's runs, never beyond them. Its interval covers the "
    "spread over seeds and, for a concave curve, the gaps between the ends."
)


def report_page(run: RunResult, refresh: int | None = None) -> str:
    """The report of one run. `refresh`: seconds after which a browser reads it again."""
    steps = sorted({row["step"] for row in run.samples})
    kls = [read_number(token, "kl") or 0.0 for row in run.samples for token in row["tokens"]]
    hottest = min(HOTTEST[1], max([HOTTEST[0], *kls]))
    samples = []
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        heading = f"{'After' if step == steps[-1] and len(steps) > 1 else 'Before'}: update {step}"
        samples.append((heading, [_sample(row, hottest) for row in run.samples if row["step"] == step]))
    return _render(
        "report.html",
        refresh=refresh,
        name=run.name,
        status=run.status if run.status != "unfinished" else f"{len(run.updates)} of {run.config.updates} updates",
        subtitle=_subtitle(run),
        figures=_figures(run),
        notes=run.notes,
        alerts=[(row["step"], *text.partition(":")) for row in run.updates for text in row.get("alerts") or ()],
        charts=[_chart(chart) for chart in run_charts(run)],
        hottest=format_number(hottest, 2),
        samples=samples,
        command=f"rlhf-kl train --config {shlex.quote(str(run.path / 'config.yaml'))} --output-dir OTHER",
        versions=" · ".join(f"{name} {value}" for name, value in (run.summary.get("versions") or {}).items()),
        config=dump_config(run.config),
    )


def compare_page(comparison: Comparison, name: str, verdict: Sequence[str]) -> str:
    """The page of a comparison."""
    runs = sum(len(variant.runs) for variant in comparison.variants)
    subtitle = f"{len(comparison.variants)} variants · {len(comparison.seeds)} seeds · {runs} runs"
    if comparison.target is not None:
        subtitle += f" · KL target {comparison.target:g} nats per {comparison.unit}"
    styles = variant_styles(comparison)
    return _render(
        "compare.html",
        refresh=None,
        name=name,
        subtitle=subtitle,
        verdict=verdict,
        notes=comparison.notes,
        held=[_chart(chart) for chart in held_charts(comparison)],
        columns=COLUMNS,
        rows=[(styles[row[0]].tint, row) for row in variant_rows(comparison)],
        table_note=TABLE_NOTE,
        charts=[_chart(chart) for chart in compare_charts(comparison)],
    )


def _render(template: str, **values: Any) -> str:
    """A template's page. Text of a run is escaped, and control characters in it are shown as text."""

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else safe_text(str(value), keep_newlines=True)

    pages = Environment(loader=PackageLoader("rlhf_kl.report"), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True, finalize=finalize)  # fmt: skip
    script = Markup(pages.get_template("page.js").render())
    version = metadata.version("rlhf-kl")
    return pages.get_template(template).render(colours=Markup(css()), script=script, version=version, **values)


def _chart(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "svg": Markup(svg(chart)), "caption": chart.caption or chart.subtitle}


# ---- the figures of a run


def _figures(run: RunResult) -> list[tuple[str, str, str]]:
    """Name, value and note of the figures at the top, without those that were not measured."""
    figures, forgotten = run.figures, run.series("eval/forward_kl_token")[1]
    perplexities, first = run.series("eval/perplexity")[1], run.updates[0] if run.updates else {}
    start = {key: f"started at {format_number(read_number(first, key))}" for key in first}
    cost = "one evaluation only"
    if figures["perplexity_cost"] is not None:
        cost = f"{format_percent(figures['perplexity_cost'], signed=True)} on {format_number(perplexities[0])}"
    ended = format_percent(run.end("rollout/eos_rate"))
    cards = [
        (f"KL per {run.unit}", figures["kl"], "", f"target {format_number(run.config.kl.target_value)} nats"),
        ("Tail error", figures["tail_error"], "", "mean |KL/target - 1|, second half"),
        ("Time in band", figures["time_in_band"], "%", f"within ±{control.BAND:.0%}, from update {control.BAND_FROM}"),
        ("Peak KL", figures["peak"], "x", "of the target"),
        ("Beta", figures["beta"], "", start.get("kl/coef", "")),
        ("Score", figures["scores"], "", start.get("objective/scores", "")),
        ("Gold", figures["gold"], "", start.get("objective/gold", "")),
        ("Held-out perplexity", figures["perplexity"], "", cost),
        ("Forgetting", forgotten[-1] if forgotten else None, "", "nats per token: KL of the reference to the policy"),
        ("Score gain", read_number(run.summary, "tilt_share"), "%", "of the largest possible at this KL"),
        ("Response length", figures["length"], "", f"tokens; {ended} end by themselves"),
    ]
    return [
        (name, format_percent(value) if unit == "%" else f"{format_number(value)}{unit}", note)
        for name, value, unit, note in cards
        if value is not None
    ]


def _subtitle(run: RunResult) -> str:
    config = run.config
    parts = [f"seed {run.seed}", f"{config.kl.controller.kind} controller", f"policy {config.policy.model}",
             f"{len(run.updates)} updates of {config.rollout.batch_size} responses"]  # fmt: skip
    if (seconds := read_number(run.summary, "seconds")) is not None:
        parts.append(f"{seconds / 60:.1f} minutes")
    return " · ".join(parts)


# ---- samples


def _sample(row: Mapping[str, Any], hottest: float) -> dict[str, Any]:
    """A response for the template, with a line of its figures."""
    heading = [
        f"{name} {format_number(value)}" for name in ("score", "gold") if (value := read_number(row, name)) is not None
    ]
    heading += [f"KL {format_number(read_number(row, 'kl'))} nats", f"{len(row['tokens'])} tokens"]
    heading += [f"{name}: {value}" for name, value in (row.get("columns") or {}).items()]
    if row.get("chosen") == "largest kl":  # not a typical one
        heading.append("selected for its large KL")
    return {
        "heading": " · ".join(heading),
        "prompt": row["prompt"],
        "tokens": [_token(token, hottest) for token in row["tokens"]],
    }


def _token(token: Mapping[str, Any], hottest: float) -> dict[str, str]:
    """A token with its colour and the text for the pointer."""
    logprob, ref, kl = (read_number(token, key) for key in ("logprob", "ref_logprob", "kl"))
    blanks = safe_text(token["text"]).replace(" ", "␣") or "∅"
    opacity = STRONGEST * min(1.0, max(0.0, kl or 0.0) / hottest)
    return {
        "text": token["text"] or "∅",
        "tip": f"{blanks}  log π {format_number(logprob)}, log ref {format_number(ref)}, KL {format_number(kl)}",
        "style": f"background:rgba(var(--hot),{opacity:.2f})" if opacity >= 0.02 else "",
    }
