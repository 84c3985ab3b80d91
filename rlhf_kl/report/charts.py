"""Charts over the updates, of one run and of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rlhf_kl.report.compare import Comparison, Variant
from rlhf_kl.report.drawing import (
    DASHES,
    HUES,
    MARKERS,
    ORDERED,
    UPDATE,
    Axes,
    Chart,
    plot_level,
    plot_line,
    plot_points,
    plot_target,
)
from rlhf_kl.report.run import RunResult
from rlhf_kl.text import format_number, format_percent, read_number

LOG_FROM = 5.0  # a KL over this many times its target, or a beta that varies by this factor, has a log axis
TOP = 3.0  # upper limit of a KL/target axis: the subtitle gives a higher peak
ROOT_KL = "√KL, nats per response"


class Line(NamedTuple):
    """A curve over the updates, with the band around it."""

    label: str
    tint: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dash: Any = "solid"


def over_updates(
    slug: str,
    title: str,
    unit: str,
    lines: Sequence[Line],
    caption: str = "",
    prepare: Callable[[Axes], object] | None = None,
) -> Chart | None:
    """Curves over the updates; None where none has values. `prepare` sets up the axes before they are drawn."""
    lines = [line for line in lines if line.x]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel=unit)
        if prepare is not None:
            prepare(axes)
        for label, tint, x, y, low, high, dash in lines:
            plot_line(axes, x, y, tint, low, high, label=label, ls=dash)

    return Chart(slug, title, draw, caption) if lines else None


def _use_log(axes: Axes, low: float, high: float) -> None:
    """A log axis where a quantity spans more than a factor of five."""
    if 0 < LOG_FROM * low < high:
        axes.set_yscale("log")


# ---- one run


def run_charts(run: RunResult) -> list[Chart]:
    """All charts that the run has figures for."""
    beta = run.series("kl/coef")
    charts = [
        _kl(run),
        over_updates(
            "beta", "Beta, the KL coefficient", "beta", [Line("beta", "c2", *beta)],
            f"Controller: {run.config.kl.controller.kind}.", lambda axes: _use_log(axes, min(beta[1]), max(beta[1])),
        ),
        _score(run),
        _path(run),
        _forgetting(run),
        over_updates(
            "length", "Response length", "tokens", [Line("length", "c4", *run.series("rollout/response_length"))]
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _kl(run: RunResult) -> Chart | None:
    """KL with its target, the band around it, the ceiling and the alerts."""
    x, y = run.series(f"kl/{run.unit}")
    ceiling = read_number(run.updates[-1], "kl/ceiling") if run.updates else None
    alerts = [float(row["step"]) for row in run.updates if row.get("alerts")]

    def prepare(axes: Axes) -> None:
        _use_log(axes, run.target, max(y))
        plot_target(axes, run.target)
        if ceiling is not None:
            plot_level(axes, ceiling, "ceiling", "alert")
        if alerts:
            plot_points(
                axes, alerts, [0.02] * len(alerts), "alert", marker="^", clip_on=False, label="alert",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip

    title, unit = f"KL to the reference, per {run.unit}", f"nats per {run.unit}"
    return over_updates("kl", title, unit, [Line("KL", "c1", x, y)], "The band is the target ± 25 %.", prepare)


def _score(run: RunResult) -> Chart | None:
    """Score with the middle 80 % of the responses, and gold."""
    scores, gold = run.series("objective/scores"), run.series("objective/gold")
    deciles = [row["objective/scores_deciles"] for row in run.updates if row.get("objective/scores_deciles")]
    band = [[values[i] for values in deciles] for i in (1, 9)] if len(deciles) == len(scores[0]) else []
    caption = "Means of each batch" + (", and the middle 80 % of the scores." if band else ".")
    return over_updates(
        "score", "Score", "score", [Line("score", "c1", *scores, *band), Line("gold", "c3", *gold)], caption
    )


def _path(run: RunResult) -> Chart | None:
    """Score and gold gain against sqrt(KL) along the run, with the highest gold."""
    points = run.gains_by_kl()
    if not points:
        return None
    kls, scores, golds = zip(*points, strict=True)
    best = max(range(len(golds)), key=golds.__getitem__)

    def draw(axes: Axes) -> None:
        axes.set(xlabel=ROOT_KL, ylabel="gain")
        plot_line(axes, kls, scores, "c1", label="score")
        plot_line(axes, kls, golds, "c3", label="gold")
        plot_points(axes, [kls[best]], [golds[best]], "alert", marker="D", label="highest gold")

    caption = "Gains over the reference along the run, means of five updates. Gold that falls while the score rises: "
    return Chart("frontier", "Score and gold against KL", draw, f"{caption}the policy exploits the reward model.")


def _forgetting(run: RunResult) -> Chart | None:
    """What the run cost on other texts, both in nats per token."""
    x, perplexities = run.series("eval/perplexity")
    if not x:
        return None
    lost = Line("held-out texts", "c4", x, [math.log(value / perplexities[0]) for value in perplexities])
    forgotten = Line("forgetting", "c2", *run.series("eval/forward_kl_token"))
    first, last = format_number(perplexities[0]), format_number(perplexities[-1])
    caption = f"Held-out texts: log perplexity since the start, where it was {first}; at the end {last}."
    if forgotten.x:
        caption += " Forgetting: KL of the reference to the policy, on the reference's samples (2509.04259)."
    return over_updates("perplexity", "Perplexity and forgetting", "nats per token", [lost, forgotten], caption)


# ---- a comparison


class Style(NamedTuple):
    """How a variant is drawn everywhere."""

    tint: str
    dash: Any
    marker: str


def variant_styles(comparison: Comparison) -> dict[str, Style]:
    """A hue for every family and a dash for every member; one large family gets an ordered scale instead."""
    families = list(comparison.families.values())
    styles = {}
    for number, members in enumerate(families):
        ordered = len(families) == 1 and len(members) > len(DASHES)
        if ordered:
            members = sorted(members, key=lambda variant: variant.constant_coef or 0.0)
        for i, variant in enumerate(members):
            shade = ORDERED[round(i * (len(ORDERED) - 1) / (len(members) - 1))] if ordered else ""
            tint, dash = shade or HUES[number % len(HUES)], DASHES[0 if ordered else i % len(DASHES)]
            styles[variant.name] = Style(tint, dash, MARKERS[i % len(MARKERS)])
    return styles


def held_charts(comparison: Comparison) -> list[Chart]:
    """One small chart a variant, by family: KL over target of every seed, with the figures that judge it."""
    styles = variant_styles(comparison)
    variants = [variant for family in comparison.families.values() for variant in family]
    return [_held(variant, f"held-{i}", styles[variant.name].tint) for i, variant in enumerate(variants)]


def held_columns(comparison: Comparison) -> int:
    """Charts side by side: three where every family has three variants, so that each has its line."""
    return 3 if {len(family) for family in comparison.families.values()} == {3} else 2


def ratio_chart(slug: str, title: str, runs: Sequence[tuple[RunResult, str, str]], figures: str) -> Chart:
    """KL over target of runs, each with a colour and a label, under the figures that judge them."""
    highest = max((ratio for run, _, _ in runs for ratio in run.ratios), default=0.0)
    figures += f" · up to {format_number(highest, 2)}x" if highest > TOP else ""

    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel="KL / target", ylim=(0.0, TOP))
        plot_target(axes, 1.0, label="")
        for run, tint, label in runs:
            ratios = [min(ratio, 1.5 * TOP) for ratio in run.ratios]
            plot_line(axes, [row["step"] for row in run.updates], ratios, tint, linewidth=1.1, label=label)

    return Chart(slug, title, draw, subtitle=figures)


def _held(variant: Variant, slug: str, tint: str) -> Chart:
    good = sum(figures.held is True for figures in variant.figures.values())
    words = ("held", "missed") if variant.is_controlled else ("at the target", "off the target")
    missed = f"{good} of {len(variant.runs)} {words[0]}" if good else words[1]
    title = variant.name + {None: "", True: f": {words[0]}", False: f": {missed}"}[variant.held]
    figures = f"tail error {format_number(variant.mean('tail_error'), 2)}"
    if (cost := variant.mean("perplexity_cost")) is not None:
        figures += f" · perplexity {format_percent(cost, signed=True)}"
    return ratio_chart(slug, title, [(run, tint, "") for run in variant.runs.values()], figures)


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Figures over the updates, means over seeds with one standard deviation."""
    unit = comparison.unit
    charts = [
        _over_time(comparison, f"kl/{unit}", "kl", "KL to the reference", f"nats per {unit}"),
        _over_time(comparison, "objective/scores", "score", "Score", "score"),
        _over_time(comparison, "objective/gold", "gold", "Gold score", "gold"),
        _over_time(comparison, "kl/coef", "beta", "Beta, the KL coefficient", "beta"),
        _over_time(comparison, "eval/perplexity", "perplexity", "Held-out perplexity", "perplexity"),
        _over_time(comparison, "eval/forward_kl_token", "forgetting", "Forgetting", "nats per token"),
    ]
    return [chart for chart in charts if chart is not None]


def _over_time(comparison: Comparison, key: str, slug: str, title: str, unit: str) -> Chart | None:
    """A key over the updates; KL with its target, beta without a band."""
    styles, target = variant_styles(comparison), comparison.target if slug == "kl" else None
    lines = []
    for variant in comparison.variants:
        line, style = Line(variant.name, "", *variant.series(key)), styles[variant.name]
        line = line._replace(tint=style.tint, dash=style.dash)
        lines.append(line._replace(low=None, high=None) if slug == "beta" else line)
    values = [value for line in lines for value in line.y]

    def prepare(axes: Axes) -> None:
        if slug in ("kl", "beta"):
            _use_log(axes, target or min(values), max(values))
        if target is not None:
            plot_target(axes, target)

    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    caption = "Means over seeds with one standard deviation." if several else "One seed."
    return over_updates(slug, title, unit, lines, "Means over seeds." if slug == "beta" else caption, prepare)
