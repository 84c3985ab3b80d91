"""Self-contained HTML pages of a run and of a comparison: one file, nothing fetched, all text of runs is escaped."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_kl.config.load import dump_config
from rlhf_kl.report import control
from rlhf_kl.report.charts import compare_charts, end_charts, held_charts, run_charts, variant_styles
from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.drawing import Chart, css, svg
from rlhf_kl.report.run import RunResult
from rlhf_kl.report.verdict import COLUMNS, variant_rows
from rlhf_kl.text import format_number, format_percent, read_number, safe_text

DIVERGING = 15  # tokens in the table
DIVERGING_STEPS = 3  # sampled updates that they are taken from
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
    versions = " · ".join(f"{name} {value}" for name, value in (run.summary.get("versions") or {}).items())
    return _render(
        "report.html",
        refresh=refresh,
        name=safe_text(run.name),
        status=run.status if run.status != "unfinished" else f"{len(run.updates)} of {run.config.updates} updates",
        subtitle=_subtitle(run),
        figures=_figures(run),
        notes=[safe_text(note) for note in run.notes],
        alerts=[
            (row["step"], *safe_text(text).partition(":")) for row in run.updates for text in row.get("alerts") or ()
        ],
        charts=[_chart(chart) for chart in run_charts(run)],
        hottest=format_number(hottest, 2),
        samples=samples,
        diverging=diverging_tokens(run.samples),
        diverging_note=f"In the sampled responses of the last {min(DIVERGING_STEPS, len(steps))} sampled updates, "
        "tokens that occur at least twice, by the mean KL at their position.",
        command=f"rlhf-kl train --config {shlex.quote(safe_text(str(run.path / 'config.yaml')))} --output-dir OTHER",
        versions=safe_text(versions),
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
        name=safe_text(name),
        subtitle=subtitle,
        verdict=[safe_text(line) for line in verdict],
        notes=[safe_text(note) for note in comparison.notes],
        held=[_chart(chart) for chart in held_charts(comparison)],
        columns=COLUMNS,
        rows=[[safe_text(cell) for cell in row] for row in variant_rows(comparison)],
        swatches=[styles[variant.name].tint for variant in comparison.variants],
        table_note=TABLE_NOTE,
        charts=[_chart(chart) for chart in compare_charts(comparison)],
        ends=[_chart(chart) for chart in end_charts(comparison)],
    )


def _render(template: str, **values: Any) -> str:
    """A template's page; every text of a run is data, so it is escaped."""
    pages = Environment(loader=PackageLoader("rlhf_kl.report"), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
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
    return safe_text(" · ".join(parts))


# ---- samples


def diverging_tokens(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Tokens of the last sampled updates by their mean KL: text, count, means of KL and log-probs, ratio."""
    steps = sorted({row["step"] for row in samples})[-DIVERGING_STEPS:]
    figures: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for token in (token for row in samples if row["step"] in steps for token in row["tokens"]):
        figures[token["text"]].append((token["kl"], token["logprob"], token["ref_logprob"]))
    means = []
    for text, values in figures.items():
        if len(values) > 1:
            kl, logprob, ref = map(fmean, zip(*values, strict=True))
            means.append((kl, logprob, ref, text))
    means.sort(reverse=True)
    return [
        [
            visible_blanks(text), str(len(figures[text])), *map(format_number, (kl, logprob, ref)),
            format_number(math.exp(min(logprob - ref, 100.0))),
        ]
        for kl, logprob, ref, text in means[:DIVERGING]
        if kl > 0
    ]  # fmt: skip


def visible_blanks(text: str) -> str:
    """A token with visible marks for the blanks at its ends."""
    printed = safe_text(text)
    left = len(printed) - len(printed.lstrip(" "))
    right = len(printed) - len(printed.rstrip(" ")) if printed.strip(" ") else 0
    return "␣" * left + printed.strip(" ") + "␣" * right or "∅"


def _sample(row: Mapping[str, Any], hottest: float) -> dict[str, Any]:
    """A response for the template, with a line of its figures."""
    heading = [
        f"{name} {format_number(value)}" for name in ("score", "gold") if (value := read_number(row, name)) is not None
    ]
    heading += [f"KL {format_number(read_number(row, 'kl'))} nats", f"{len(row['tokens'])} tokens"]
    heading += [safe_text(f"{name}: {value}") for name, value in (row.get("columns") or {}).items()]
    if row.get("chosen") == "largest kl":  # not a typical one
        heading.append("selected for its large KL")
    return {
        "heading": " · ".join(heading),
        "prompt": safe_text(row["prompt"], keep_newlines=True),
        "tokens": [_token(token, hottest) for token in row["tokens"]],
    }


def _token(token: Mapping[str, Any], hottest: float) -> dict[str, str]:
    """A token with its colour and the text for the pointer."""
    logprob, ref, kl = (read_number(token, key) for key in ("logprob", "ref_logprob", "kl"))
    opacity = STRONGEST * min(1.0, max(0.0, kl or 0.0) / hottest)
    return {
        "text": safe_text(token["text"], keep_newlines=True) or "∅",
        "tip": f"{visible_blanks(token['text'])}  log π {format_number(logprob)}, log ref {format_number(ref)}, "
        f"KL {format_number(kl)}",
        "style": f"background:rgba(var(--hot),{opacity:.2f})" if opacity >= 0.02 else "",
    }
