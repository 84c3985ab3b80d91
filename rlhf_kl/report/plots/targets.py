"""The chart of a sweep over KL targets: the score at each target, and where the true score falls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.gold_peak import GoldPeak, gold_peak
from rlhf_kl.report.plots.chart import Axes, Chart, add_legend, columns, plot_level, plot_line, plot_points
from rlhf_kl.report.plots.style import colour
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number

LINES = (("scores", "score", "c1"), ("gold", "true score (gold)", "c2"))


def target_charts(comparison: Comparison) -> list[Chart]:
    """Score and gold at the end against the KL target, means over seeds; none if targets do not vary."""
    variants = comparison.by_target
    curves = [(label, tint, *_curve(variants, name)) for name, label, tint in LINES]
    curves = [curve for curve in curves if len(curve[2]) > 1]
    if not curves:
        return []
    peak = gold_peak(variants)
    run = next(iter(variants[0].runs.values()))
    start = {label: run.reference(f"objective/{name}") for name, label, _ in LINES}

    def draw(axes: Axes) -> None:
        axes.set(xlabel=f"KL target, nats per {comparison.unit}", ylabel="at the end", xscale="log")
        for label, tint, x, mean, low, high in curves:
            plot_line(axes, x, mean, tint, low, high, label=label, marker="o")
            if (value := start[label]) is not None:
                plot_level(axes, value, "the start" if tint == LINES[0][2] else "", tint)
        targets = [variant.config.kl.target_value for variant in variants]
        axes.set_xticks(targets, [f"{target:g}" for target in targets])
        if peak is not None:
            plot_points(axes, [peak.target], [peak.gold], "ink", marker="D", markersize=8, label="highest")
            _name_sides(axes, targets, peak)
        add_legend(axes)

    caption = "Means over seeds with one standard deviation, last ten updates. Dashed: the start."
    if peak is not None:
        caption += f" Diamond: the highest gold, {format_number(peak.gold)} at the target {peak.target:g}."
        caption += " Green: the targets whose gold is within one standard deviation of that."
    places = columns("KL target", [(label, x, mean) for label, _, x, mean, _, _ in curves])
    return [Chart("targets", "Score and true score by KL target", draw, places, caption)]


def _name_sides(axes: Axes, targets: Sequence[float], peak: GoldPeak) -> None:
    """Shade the right targets and write what lies on each side of them."""
    low, high = targets[0] * math.sqrt(targets[0] / targets[1]), targets[-1] * math.sqrt(targets[-1] / targets[-2])
    below = [target for target in targets if target < peak.lowest]
    above = [target for target in targets if target > peak.highest]
    left = math.sqrt(max(below) * peak.lowest) if below else low
    end = math.sqrt(min(above) * peak.highest) if above else high
    axes.set_xlim(low, high)
    axes.axvspan(left, end, color=colour("band"), zorder=0.4, linewidth=0)
    for words, start, stop in (("too little", low, left), ("right", left, end), ("too much", end, high)):
        if stop > start:
            axes.annotate(
                words, (math.sqrt(start * stop), 0), xytext=(0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", color=colour("muted"),
            )  # fmt: skip


def _curve(variants: Sequence[Variant], name: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Targets, means of a figure over seeds, and those minus and plus one standard deviation."""
    points = [
        (variant.config.kl.target_value, mean, variant.sd(name) or 0.0)
        for variant in variants
        if (mean := variant.mean(name)) is not None
    ]
    means = [mean for _, mean, _ in points]
    low, high = [mean - sd for _, mean, sd in points], [mean + sd for _, mean, sd in points]
    return [x for x, _, _ in points], means, low, high
