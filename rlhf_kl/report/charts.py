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
    Axes,
    Chart,
    Line,
    colour,
    log_if_wide,
    marks,
    with_values,
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
    alone = [Variant(run.name, run.name, {run.seed: run})]
    styles = variant_styles(Comparison(alone, []))
    sweep = (_kl_over_beta(alone, styles), _total_reward(alone, styles)) if run.reference_figures else ()
    return with_values([_kl(run), _score(run), _beta(run), _path(run), *sweep, _forgetting(run)])


def _kl(run: RunResult) -> Chart:
    """KL with its target, the band around it, the ceiling and the alerts."""
    x, y = run.series(f"kl/{run.unit}")
    alerts = [float(row["step"]) for row in run.updates if row.get("alerts")]

    def draw_alerts(axes: Axes) -> None:
        if alerts:
            bottom = axes.get_xaxis_transform()
            axes.plot(alerts, [0.02] * len(alerts), "^", color=colour("alert"), clip_on=False, label="alert",
                      transform=bottom)  # fmt: skip

    target = run.config.kl.target_value
    return Chart(
        "kl",
        f"KL to the reference, per {run.unit}",
        f"nats per {run.unit}",
        [Line("KL", "c1", x, y)],
        "The band is the target ± 25 %.",
        log=log_if_wide(target, max(y, default=0.0)),
        target=target,
        ceiling=read_number(run.updates[-1], "kl/ceiling") if run.updates else None,
        more=draw_alerts,
    )


def _score(run: RunResult) -> Chart:
    """Score with the middle 80 % of the responses, and gold."""
    scores, gold = run.series("objective/scores"), run.series("objective/gold")
    deciles = [row["objective/scores_deciles"] for row in run.updates if row.get("objective/scores_deciles")]
    if len(deciles) < len(scores[0]):
        deciles = []
    low, high = ([values[i] for values in deciles] for i in (1, 9))
    lines = [Line("score", "c1", *scores, low, high), Line("gold", "c3", *gold)]
    caption = "Means of each batch" + (", and the middle 80 % of the scores." if deciles else ".")
    return Chart("score", "Score", "score", lines, caption)


def _beta(run: RunResult) -> Chart:
    x, beta = run.series("kl/coef")
    log = log_if_wide(min(beta, default=0.0), max(beta, default=0.0))
    caption = f"Controller: {run.config.kl.controller.kind}."
    return Chart("beta", "Beta, the KL coefficient", "beta", [Line("beta", "c2", x, beta)], caption, log=log)


def _path(run: RunResult) -> Chart | None:
    """Score and gold gain against sqrt(KL) along the run, with the highest gold."""
    points = run.gains_by_kl()
    if not points:
        return None
    kls, scores, golds = zip(*points, strict=True)
    best = golds.index(max(golds))
    lines = [
        Line("score", "c1", kls, scores),
        Line("gold", "c3", kls, golds),
        marks("highest gold", "alert", [kls[best]], [golds[best]], "D"),
    ]
    caption = (
        "Gains over the reference along the run, means of five updates. Gold that falls while the score rises: the "
        "policy exploits the reward model."
    )
    return Chart("frontier", "Score and gold against KL", "gain", lines, caption, xlabel=ROOT_KL)


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
    return Chart("perplexity", "Perplexity and forgetting", "nats per token", [lost, forgotten], caption)


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
    lines = [
        Line(label, tint, [row["step"] for row in run.updates], [min(ratio, 1.5 * TOP) for ratio in run.ratios])
        for run, tint, label in runs
    ]
    return Chart(slug, title, "KL / target", lines, subtitle=figures, ylim=(0.0, TOP), target=1.0)


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Means over seeds by update, score against sqrt(KL), and of a sweep of betas or targets what it is made for."""
    sweep, styles = comparison.sweep, variant_styles(comparison)
    return with_values(
        [
            _over_time(comparison, "objective/scores", "score", "Score"),
            _over_time(comparison, "eval/perplexity", "perplexity", "Held-out perplexity"),
            _over_time(comparison, "kl/coef", "beta", "Beta, the KL coefficient"),
            _frontier(comparison),
            *((_kl_over_beta(sweep, styles), _total_reward(sweep, styles)) if sweep else ()),
            _targets(comparison),
        ]
    )


def _over_time(comparison: Comparison, key: str, slug: str, title: str) -> Chart:
    """A key over the updates, each variant's mean with one standard deviation."""
    styles = variant_styles(comparison)
    lines = [Line(v.name, styles[v.name].tint, *v.series(key), styles[v.name].dash) for v in comparison.variants]
    values = [value for line in lines for value in line.y] or [0.0]
    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    caption = "Means over seeds with one standard deviation." if several else "One seed."
    log = log_if_wide(min(values), max(values)) if slug == "beta" else ""
    return Chart(slug, title, slug, lines, caption, log=log)


def _frontier(comparison: Comparison) -> Chart | None:
    """Score over sqrt(KL) at the ends of the runs, a point for each seed, with the upper limit."""
    styles, reference = variant_styles(comparison), _reference(comparison.variants)
    lines = [
        marks(variant.name, styles[variant.name].tint, *_columns(list(ends.values())), styles[variant.name].marker)
        for variant in comparison.variants
        if (ends := variant.ends("scores_shaped"))
    ]
    if not lines:
        return None
    caption = "Each point is the end of one run."
    if tilt := _tilt(reference):
        lines.append(Line("upper limit", "ink", [math.sqrt(kl) for _, kl, _ in tilt], [gain for *_, gain in tilt]))
        caption += " Solid: the largest possible gain at a KL (the reference's samples, weighted by exp(score/beta))."
    if best := reference.get("best_of_n"):
        x, y = [math.sqrt(point["kl_bound"]) for point in best], [point["gain"] for point in best]
        lines.append(Line("best of n", "muted", x, y, dash=DASHES[1], marker="."))
        caption += f" Dashed: best of n reference samples, n up to {best[-1]['n']}, at the upper bound of its KL."
    return Chart("frontier", "Score against KL", "score gain, in reference sd", lines, caption, xlabel=ROOT_KL)


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
    lines = [Line("second half", "c6", *_columns(path), marker="")]
    lines += [marks("", styles[name].tint, [own["beta"]], [own["kl_sequence"]]) for name, own in runs]
    lines += [Line("tilt", "ink", *_columns(tilt), marker="")]
    if spread := read_number(reference, "scores_spread"):  # the Gaussian law has no bound where scores saturate
        most = 3 * max([own["kl_sequence"] for _, own in runs] + [kl for _, kl in tilt])
        betas = [max(low, spread / math.sqrt(2 * most)), high]
        law = [spread**2 / (2 * beta**2) for beta in betas]
        lines.append(Line("Gaussian law", "muted", betas, law, dash=DASHES[1], marker=""))
    caption = (
        "Solid line: the reference's samples weighted by exp(score/beta), the optimum of score - beta*KL, estimated "
        "from these samples. Dashed: σ²/(2β²), for Gaussian scores. A run that was still moving lies off the lines."
    )
    title, unit = "KL at the end against beta", "nats per response"
    return Chart("kl-beta", title, unit, lines, caption, xlabel="beta", log="xy")


def _total_reward(variants: Sequence[Variant], styles: Mapping[str, Style]) -> Chart | None:
    """The total reward of each variant's end, score - beta*KL, over beta; the tilt is the limit."""
    betas = [i * LARGEST_BETA / 40 for i in range(41)]
    lines = [
        Line(v.name, styles[v.name].tint, betas, [gain - beta * kl for beta in betas], dash=styles[v.name].dash)
        for v in variants
        if (gain := v.mean("score_gain")) is not None and (kl := v.mean("kl_sequence")) is not None
    ]
    if not lines:
        return None
    best = max(max(line.y) for line in lines)
    limit = sorted((coef, gain - coef * kl) for coef, kl, gain in _tilt(_reference(variants)) if coef <= LARGEST_BETA)
    top = 1.15 * max([best, *(worth for _, worth in limit)])
    caption = (
        "Each line is the end of one variant's runs (mean over seeds): its score gain minus beta for each nat of KL. "
        "The limit holds for any policy; it is estimated from the reference's samples."
    )
    return Chart(
        "total-reward",
        "Total reward by beta",
        "score gain - beta · KL",
        [*lines, Line("limit", "ink", *_columns(limit), dash=DASHES[1], marker="")],
        caption,
        xlabel="beta that pays for KL",
        ylim=(-0.75 * best, top) if best > 0 else None,
    )


def _targets(comparison: Comparison) -> Chart | None:
    """Score and gold at the end by KL target, and between which targets gold is highest."""
    variants, best = comparison.by_target, comparison.best_target
    targets, lines = [variant.target for variant in variants], []
    for name, label, tint in (("scores", "score", "c1"), ("gold", "true score (gold)", "c3")):
        known = [(v.target, mean, v.sd(name) or 0.0) for v in variants if (mean := v.mean(name)) is not None]
        x, low, high = [t for t, _, _ in known], [m - s for _, m, s in known], [m + s for _, m, s in known]
        lines.append(Line(label, tint, x, [mean for _, mean, _ in known], low, high, marker="o"))
    caption = "Means over seeds with one standard deviation, last ten updates."
    if best is not None:
        lines.append(marks("highest", "ink", [best.target], [best.gold], "D", size=8))
        caption += f" Diamond: the highest gold, {format_number(best.gold)} at the target {best.target:g}. Green: the "
        caption += "targets whose gold is within one standard deviation of that."

    def draw_sides(axes: Axes) -> None:
        axes.set_xticks(targets, [f"{target:g}" for target in targets])
        if best is not None:
            _name_sides(axes, targets, best)

    xlabel = f"KL target, nats per {comparison.unit}"
    return Chart(
        "targets", "Score and true score by KL target", "at the end", lines, caption, xlabel=xlabel, log="x",
        more=draw_sides,
    )  # fmt: skip


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
