"""The chart of a sweep over KL targets: what a looser target gains, and where the true score turns."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.plots.chart import Axes, Chart, add_legend, columns, plot_level, plot_line, plot_points
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number

LINES = (("scores", "score of the reward", "c1"), ("gold", "true score (gold)", "c2"))


def target_charts(comparison: Comparison) -> list[Chart]:
    """Score and gold at the end against the KL target, means over seeds; none where targets do not vary."""
    variants = comparison.by_target
    curves = [(label, tint, *_curve(variants, name)) for name, label, tint in LINES]
    curves = [curve for curve in curves if len(curve[2]) > 1]
    if not curves:
        return []
    peak = best_target(variants)
    run = next(iter(variants[0].runs.values()))
    start = {label: run.reference(f"objective/{name}") for name, label, _ in LINES}

    def draw(axes: Axes) -> None:
        axes.set(xlabel=f"KL target, nats per {comparison.unit}", ylabel="at the end", xscale="log")
        for label, tint, x, mean, low, high in curves:
            plot_line(axes, x, mean, tint, low, high, label=label, marker="o")
            if (value := start[label]) is not None:
                plot_level(axes, value, "", tint)
        if peak is not None:
            plot_points(axes, [peak[0]], [peak[1]], "ink", marker="D", markersize=8, label="highest true score")
        targets = [variant.config.kl.target_value for variant in variants]
        axes.set_xticks(targets, [f"{target:g}" for target in targets], minor=False)
        axes.set_xticks([], minor=True)
        add_legend(axes)

    caption = "Means over seeds with one standard deviation, last ten updates. Dashed: the reference."
    if peak is not None:
        caption += f" Diamond: the highest gold, {format_number(peak[1])} at the target {peak[0]:g}."
    places = columns("KL target", [(label, x, mean) for label, _, x, mean, _, _ in curves])
    return [Chart("targets", "Score and true score by KL target", draw, places, caption)]


def best_target(variants: Sequence[Variant]) -> tuple[float, float] | None:
    """The target with the highest mean gold, and that gold; None without gold."""
    x, mean, _, _ = _curve(variants, "gold")
    return max(zip(x, mean, strict=True), key=lambda point: point[1], default=None)


def _curve(variants: Sequence[Variant], name: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Targets, means of a figure over seeds, and those less and plus one standard deviation."""
    points = [
        (variant.config.kl.target_value, mean, variant.sd(name) or 0.0)
        for variant in variants
        if (mean := variant.mean(name)) is not None
    ]
    means = [mean for _, mean, _ in points]
    low, high = [mean - sd for _, mean, sd in points], [mean + sd for _, mean, sd in points]
    return [x for x, _, _ in points], means, low, high
