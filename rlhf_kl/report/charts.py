"""The charts of a run and of a comparison: over the updates, and the runs' ends against KL, beta and target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_kl.report.compare import BestTarget, Comparison, Variant
from rlhf_kl.report.control import tail
from rlhf_kl.report.drawing import (
    HUES,
    ORDERED,
    UPDATE,
    Axes,
    Chart,
    Line,
    colour,
    over_updates,
    plot_band,
    plot_level,
    plot_line,
    plot_points,
    plot_target,
    use_log,
)  # fmt: skip
from rlhf_kl.report.run import RunResult
from rlhf_kl.text import format_number, format_percent, read_number

DASHES = ("solid", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
TOP = 3.0  # upper limit of a KL/target axis: the subtitle gives a higher peak
ROOT_KL = "√KL, nats per response"
LARGEST_BETA = 1.0  # of the total-reward lines


class Style(NamedTuple):
    """How a variant is drawn everywhere."""

    tint: str
    dash: Any
    marker: str


def variant_styles(comparison: Comparison) -> dict[str, Style]:
    """A hue for every family and a dash for every member; one large family gets an ordered scale instead."""
    families, styles = list(comparison.families.values()), {}
    for number, members in enumerate(families):
        ordered = len(families) == 1 and len(members) > len(DASHES)
        if ordered:
            members = sorted(members, key=lambda variant: variant.constant_coef or 0.0)
        for i, variant in enumerate(members):
            tint, dash = HUES[number % len(HUES)], DASHES[i % len(DASHES)]
            if ordered:
                tint, dash = ORDERED[round(i * (len(ORDERED) - 1) / (len(members) - 1))], DASHES[0]
            styles[variant.name] = Style(tint, dash, MARKERS[i % len(MARKERS)])
    return styles


# ---- one run


def run_charts(run: RunResult) -> list[Chart]:
    """All charts that the run has figures for."""
    beta, alone = run.series("kl/coef"), [Variant(run.name, run.name, {run.seed: run})]
    styles = variant_styles(Comparison(alone, []))
    caption = f"Controller: {run.config.kl.controller.kind}."
    charts = [
        _kl(run),
        _score(run),
        over_updates("beta", "Beta, the KL coefficient", "beta", [Line("beta", "c2", *beta)], caption,
                     lambda axes: use_log(axes, min(beta[1]), max(beta[1]))),
        _path(run),
        *((_kl_over_beta(alone, styles), _total_reward(alone, styles)) if run.reference_figures else ()),
        _forgetting(run),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _kl(run: RunResult) -> Chart | None:
    """KL with its target, the band around it, the ceiling and the alerts."""
    x, y = run.series(f"kl/{run.unit}")
    target, ceiling = run.config.kl.target_value, read_number(run.updates[-1], "kl/ceiling") if run.updates else None
    alerts = [float(row["step"]) for row in run.updates if row.get("alerts")]

    def prepare(axes: Axes) -> None:
        use_log(axes, target, max(y))
        plot_target(axes, target)
        if ceiling is not None:
            plot_level(axes, ceiling, "ceiling", "alert")
        if alerts:
            bottom = axes.get_xaxis_transform()
            plot_points(axes, alerts, [0.02] * len(alerts), "alert", marker="^", clip_on=False, label="alert",
                        transform=bottom)  # fmt: skip

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
    best = golds.index(max(golds))

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


def held_charts(comparison: Comparison) -> list[Chart]:
    """One small chart a variant, by family: KL over target of every seed, with the figures that judge it."""
    styles, charts = variant_styles(comparison), []
    for i, variant in enumerate(variant for family in comparison.families.values() for variant in family):
        good = sum(run.figures["held"] is True for run in variant.runs.values())
        yes, no = ("held", "missed") if variant.is_controlled else ("at the target", "off the target")
        title = variant.name
        if variant.held is not None:
            title += f": {yes if variant.held else f'{good} of {len(variant.runs)} {yes}' if good else no}"
        figures = f"tail error {format_number(variant.mean('tail_error'), 2)}"
        if (cost := variant.mean("perplexity_cost")) is not None:
            figures += f" · perplexity {format_percent(cost, signed=True)}"
        runs = [(run, styles[variant.name].tint, "") for run in variant.runs.values()]
        charts.append(ratio_chart(f"held-{i}", title, runs, figures))
    return charts


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


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Means over seeds by update, score against sqrt(KL), and of a sweep of betas or targets what it is made for."""
    sweep, styles = comparison.sweep, variant_styles(comparison)
    charts = [
        _over_time(comparison, "objective/scores", "score", "Score"),
        _over_time(comparison, "eval/perplexity", "perplexity", "Held-out perplexity"),
        _over_time(comparison, "kl/coef", "beta", "Beta, the KL coefficient"),
        _frontier(comparison),
        *((_kl_over_beta(sweep, styles), _total_reward(sweep, styles)) if sweep else ()),
        _targets(comparison),
    ]
    return [chart for chart in charts if chart is not None]


def _over_time(comparison: Comparison, key: str, slug: str, title: str) -> Chart | None:
    """A key over the updates, each variant's mean with one standard deviation."""
    lines, styles = [], variant_styles(comparison)
    for variant in comparison.variants:
        x, mean, low, high = variant.series(key)
        style = styles[variant.name]
        lines.append(Line(variant.name, style.tint, x, mean, low, high, style.dash))
    values = [value for line in lines for value in line.y]
    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    caption = "Means over seeds with one standard deviation." if several else "One seed."
    prepare = (lambda axes: use_log(axes, min(values), max(values))) if slug == "beta" else None
    return over_updates(slug, title, slug, lines, caption, prepare)


def _frontier(comparison: Comparison) -> Chart | None:
    """Score over sqrt(KL) at the ends of the runs, a point for each seed, with the upper limit."""
    ends = {v.name: list(seeds.values()) for v in comparison.variants if (seeds := v.ends("scores_shaped"))}
    if not ends:
        return None
    styles, reference = variant_styles(comparison), _reference(comparison.variants)
    tilt = [(math.sqrt(kl), gain) for _, kl, gain in _tilt(reference)]
    best_of = reference.get("best_of_n") or []
    best = [(math.sqrt(point["kl_bound"]), point["gain"]) for point in best_of]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=ROOT_KL, ylabel="score gain, in reference sd")
        for name, points in ends.items():
            plot_points(axes, *_columns(points), styles[name].tint, marker=styles[name].marker, label=name)
        if tilt:
            plot_line(axes, *_columns(tilt), "ink", marker="", label="upper limit")
        if best:
            plot_line(axes, *_columns(best), "muted", marker=".", ls=DASHES[1], label="best of n")

    caption = "Each point is the end of one run."
    if tilt:
        caption += " Solid: the largest possible gain at a KL (the reference's samples, weighted by exp(score/beta))."
    if best:
        caption += f" Dashed: best of n reference samples, n up to {best_of[-1]['n']}, at the upper bound of its KL."
    return Chart("frontier", "Score against KL", draw, caption)


def _kl_over_beta(variants: Sequence[Variant], styles: Mapping[str, Style]) -> Chart | None:
    """The KL at the end of each run by its beta there, with the tilt of the reference's samples and the Gaussian law.

    A single run has the updates of its second half too.
    """
    reference = _reference(variants)
    runs = [(variant.name, run.figures) for variant in variants for run in variant.runs.values()]
    runs = [(name, figures) for name, figures in runs if figures["beta"] and figures["kl_sequence"]]
    if not runs:
        return None
    updates = next(iter(variants[0].runs.values())).updates if len(variants) == 1 else []
    path = [(row["kl/coef"], kl) for row in tail(updates) if (kl := row["kl/sequence"])]
    betas = [own["beta"] for _, own in runs] + [coef for coef, _ in path if coef > 0]
    betas += [coef for coef, _, _ in _tilt(reference) if path and 0 < coef <= LARGEST_BETA]
    low, high = min(betas) / 1.6, max(betas) * 1.6
    tilt = [(coef, kl) for coef, kl, _ in _tilt(reference) if low <= coef <= high and kl > 0]
    most = 3 * max([own["kl_sequence"] for _, own in runs] + [kl for _, kl in tilt])

    def draw(axes: Axes) -> None:
        axes.set(xlabel="beta", ylabel="nats per response", xscale="log", yscale="log")
        if path:
            plot_line(axes, *_columns(path), "c1", marker="", linewidth=0.8, alpha=0.6, label="second half")
        for name, own in runs:
            plot_points(axes, [own["beta"]], [own["kl_sequence"]], styles[name].tint)
        if tilt:
            plot_line(axes, *_columns(tilt), "ink", marker="", label="tilt")
        if spread := read_number(reference, "scores_spread"):  # the Gaussian law has no bound where scores saturate
            betas = [max(low, spread / math.sqrt(2 * most)), high]
            kls = [spread**2 / (2 * beta**2) for beta in betas]
            plot_line(axes, betas, kls, "muted", marker="", ls=DASHES[1], label="Gaussian law")

    caption = (
        "Solid line: the reference's samples weighted by exp(score/beta), the optimum of score - beta*KL, estimated "
        "from these samples. Dashed: σ²/(2β²), for Gaussian scores. A run that was still moving lies off the lines."
    )
    return Chart("kl-beta", "KL at the end against beta", draw, caption)


def _total_reward(variants: Sequence[Variant], styles: Mapping[str, Style]) -> Chart | None:
    """The total reward of each variant's end, score - beta*KL, over beta; the tilt is the limit."""
    betas = [i * LARGEST_BETA / 40 for i in range(41)]
    lines = {
        variant.name: [gain - beta * kl for beta in betas]
        for variant in variants
        if (gain := variant.mean("score_gain")) is not None and (kl := variant.mean("kl_sequence")) is not None
    }
    if not lines:
        return None
    limit = sorted((coef, gain - coef * kl) for coef, kl, gain in _tilt(_reference(variants)) if coef <= LARGEST_BETA)

    def draw(axes: Axes) -> None:
        best = max(max(line) for line in lines.values())
        top = 1.15 * max([best, *(worth for _, worth in limit)])
        axes.set(xlabel="beta that pays for KL", ylabel="score gain - beta · KL")
        if best > 0:
            axes.set_ylim(-0.75 * best, top)
        for name, line in lines.items():
            plot_line(axes, betas, line, styles[name].tint, ls=styles[name].dash, linewidth=1.3, label=name)
        if limit:
            plot_line(axes, *_columns(limit), "ink", marker="", ls=DASHES[1], label="limit")

    caption = (
        "Each line is the end of one variant's runs (mean over seeds): its score gain minus beta for each nat of KL. "
        "The limit holds for any policy; it is estimated from the reference's samples."
    )
    return Chart("total-reward", "Total reward by beta", draw, caption)


def _targets(comparison: Comparison) -> Chart | None:
    """Score and gold at the end by KL target, and between which targets gold is highest."""
    variants, best = comparison.by_target, comparison.best_target
    lines: dict[str, list[tuple[float, float, float]]] = {
        label: [(v.target, mean, v.sd(name) or 0.0) for v in variants if (mean := v.mean(name)) is not None]
        for name, label in (("scores", "score"), ("gold", "true score (gold)"))
    }
    if not variants or not lines["score"]:
        return None
    targets = [variant.target for variant in variants]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=f"KL target, nats per {comparison.unit}", ylabel="at the end", xscale="log")
        for (label, points), tint in zip(lines.items(), HUES, strict=False):
            x, low, high = [t for t, _, _ in points], [m - s for _, m, s in points], [m + s for _, m, s in points]
            plot_band(axes, x, low, high, tint)
            plot_line(axes, x, [mean for _, mean, _ in points], tint, label=label, marker="o")
        axes.set_xticks(targets, [f"{target:g}" for target in targets])
        if best is not None:
            plot_points(axes, [best.target], [best.gold], "ink", marker="D", markersize=8, label="highest")
            _name_sides(axes, targets, best)

    caption = "Means over seeds with one standard deviation, last ten updates."
    if best is not None:
        caption += f" Diamond: the highest gold, {format_number(best.gold)} at the target {best.target:g}. Green: the "
        caption += "targets whose gold is within one standard deviation of that."
    return Chart("targets", "Score and true score by KL target", draw, caption)


def _name_sides(axes: Axes, targets: Sequence[float], best: BestTarget) -> None:
    """Shades the right targets, and writes what lies on each side of them."""
    low, high = axes.get_xlim()
    left = max((math.sqrt(target * best.lowest) for target in targets if target < best.lowest), default=low)
    right = min((math.sqrt(target * best.highest) for target in targets if target > best.highest), default=high)
    axes.set_xlim(low, high)
    axes.axvspan(left, right, color=colour("band"), zorder=0.4, linewidth=0)
    for label, start, stop in (("too little", low, left), ("right", left, right), ("too much", right, high)):
        if stop > start:
            axes.annotate(
                label, (math.sqrt(start * stop), 0), xytext=(0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", color=colour("muted"),
            )  # fmt: skip


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y of points."""
    return [x for x, _ in points], [y for _, y in points]


def _reference(variants: Sequence[Variant]) -> Mapping[str, Any]:
    """The reference's own figures in the first summary that has them; all runs of a comparison share the reference."""
    runs = [run for variant in variants for run in variant.runs.values()]
    return next((run.reference_figures for run in runs if run.reference_figures), {})


def _tilt(reference: Mapping[str, Any]) -> list[tuple[float, float, float]]:
    """(beta, sequence KL, score gain) of the tilted reference samples."""
    return [(point["coef"], point["kl"], point["gain"]) for point in reference.get("tilt") or []]
