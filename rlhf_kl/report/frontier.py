"""Charts of the runs' ends in a comparison, against KL, beta and target."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_kl.report.charts import ROOT_KL, variant_styles
from rlhf_kl.report.compare import BestTarget, Comparison, Variant, mean_curve
from rlhf_kl.report.drawing import DASHES, Axes, Chart, colour, plot_line, plot_points
from rlhf_kl.report.run import RunResult
from rlhf_kl.text import format_number, read_number

LARGEST_BETA = 1.0  # of the total-reward lines


def frontier_charts(comparison: Comparison) -> list[Chart]:
    """Score and gold against sqrt(KL); of a sweep of betas KL and total reward; of targets score and gold."""
    charts = [
        _frontier(comparison, "scores_shaped", "frontier", "Score against KL", "score gain, in reference sd"),
        _frontier(comparison, "gold", "frontier-gold", "Gold against KL", "gold gain"),
        _kl_over_beta(comparison),
        _total_reward(comparison),
        _targets(comparison),
    ]
    return [chart for chart in charts if chart is not None]


def _frontier(comparison: Comparison, measure: str, slug: str, title: str, unit: str) -> Chart | None:
    """The ends of the runs, a point for each seed, with the upper limit."""
    ends = {variant.name: list(seeds.values()) for variant in comparison.variants if (seeds := variant.ends(measure))}
    if not ends:
        return None
    styles, first = variant_styles(comparison), _with_reference(comparison.variants)
    tilt = [(math.sqrt(kl), gain) for _, kl, gain in _tilt(first)] if measure == "scores_shaped" else []
    key = "gain" if measure == "scores_shaped" else "gold_gain"
    best_of = first.reference_figures.get("best_of_n") or []
    best = [(math.sqrt(point["kl_bound"]), point[key]) for point in best_of if point.get(key) is not None]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=ROOT_KL, ylabel=unit)
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
    return Chart(slug, title, draw, caption)


def _kl_over_beta(comparison: Comparison) -> Chart | None:
    """The KL at the end by beta, with the tilt of the reference's samples and the Gaussian law."""
    sweep, styles = comparison.sweep, variant_styles(comparison)
    points = [
        (variant.name, coef, figures.kl_sequence, figures.settled)
        for variant in sweep
        for seed, figures in variant.figures.items()
        if (coef := variant.runs[seed].constant_coef) and figures.kl_sequence
    ]
    if not points:
        return None
    first = _with_reference(sweep)
    spread = read_number(first.reference_figures, "scores_spread")
    low, high = min(coef for _, coef, _, _ in points) / 1.6, max(coef for _, coef, _, _ in points) * 1.6
    tilt = [(coef, kl) for coef, kl, _ in _tilt(first) if low <= coef <= high and kl > 0]
    most = 3 * max([kl for *_, kl, _ in points] + [kl for _, kl in tilt])

    def draw(axes: Axes) -> None:
        axes.set(xlabel="beta", ylabel="nats per response", xscale="log", yscale="log")
        for name, coef, kl, settled in points:
            fill = {} if settled else {"markerfacecolor": "none"}
            plot_points(axes, [coef], [kl], styles[name].tint, **fill)
        if tilt:
            plot_line(axes, *_columns(tilt), "ink", marker="", label="tilt")
        if spread:  # the Gaussian law has no bound where scores saturate
            betas = [max(low, spread / math.sqrt(2 * most)), high]
            kls = [spread**2 / (2 * beta**2) for beta in betas]
            plot_line(axes, betas, kls, "muted", marker="", ls=DASHES[1], label="Gaussian law")

    caption = (
        "Hollow: the KL had not settled. Solid line: the reference's samples weighted by exp(score/beta), the optimum "
        "of score - beta*KL, estimated from these samples. Dashed: σ²/(2β²), for Gaussian scores."
    )
    return Chart("kl-beta", "KL at the end against beta", draw, caption)


def _total_reward(comparison: Comparison) -> Chart | None:
    """The total reward of each run's end, score - beta*KL, over beta; the tilt is the limit."""
    styles = variant_styles(comparison)
    betas = [i * LARGEST_BETA / 40 for i in range(41)]
    lines = {
        variant.name: [gain - beta * kl for beta in betas]
        for variant in comparison.sweep
        if (gain := variant.mean("score_gain")) is not None and (kl := variant.mean("kl_sequence")) is not None
    }
    if not lines:
        return None
    limit = sorted(
        (coef, gain - coef * kl) for coef, kl, gain in _tilt(_with_reference(comparison.sweep)) if coef <= LARGEST_BETA
    )

    def draw(axes: Axes) -> None:
        best = max(max(line) for line in lines.values())
        top = 1.15 * max([best, *(worth for _, worth in limit)])
        axes.set(xlabel="beta that pays for KL", ylabel="score gain - beta · KL", ylim=(-0.75 * best, top))
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
    lines = {}
    for name, label, tint in (("scores", "score", "c1"), ("gold", "true score (gold)", "c2")):
        known = [variant for variant in variants if variant.mean(name) is not None]
        if len(known) > 1:
            means, sds = [v.mean(name) or 0.0 for v in known], [v.sd(name) or 0.0 for v in known]
            lines[label] = tint, mean_curve([v.target for v in known], means, sds)
    if not lines:
        return None
    targets = [variant.target for variant in variants]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=f"KL target, nats per {comparison.unit}", ylabel="at the end", xscale="log")
        for label, (tint, curve) in lines.items():
            plot_line(axes, *curve[:2], tint, *curve[2:], label=label, marker="o")
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
    for words, start, stop in (("too little", low, left), ("right", left, right), ("too much", right, high)):
        if stop > start:
            axes.annotate(
                words, (math.sqrt(start * stop), 0), xytext=(0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", color=colour("muted"),
            )  # fmt: skip


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y of points."""
    return [x for x, _ in points], [y for _, y in points]


def _with_reference(variants: Sequence[Variant]) -> RunResult:
    """The first run whose summary has the reference's samples; all runs of a comparison share the reference."""
    runs = [run for variant in variants for run in variant.runs.values()]
    return next((run for run in runs if run.reference_figures), runs[0])


def _tilt(run: RunResult) -> list[tuple[float, float, float]]:
    """(beta, sequence KL, score gain) of the tilted reference samples."""
    return [(point["coef"], point["kl"], point["gain"]) for point in run.reference_figures.get("tilt") or []]
