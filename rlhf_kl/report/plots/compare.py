"""The charts of a comparison over time."""

from __future__ import annotations

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.plots.chart import (
    UPDATE,
    Axes,
    Chart,
    columns,
    plot_line,
    plot_target,
)
from rlhf_kl.report.plots.variants import variant_styles
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number, format_percent

TOP = 3.0  # upper limit of a KL/target axis: the subtitle gives a higher peak


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Curves over time, means over seeds with one standard deviation."""
    unit = comparison.unit
    charts = [
        _over_time(comparison, f"kl/{unit}", "kl", "KL to the reference", f"nats per {unit}", comparison.target),
        _over_time(comparison, "objective/scores", "score", "Score", "score of the reward"),
        _over_time(comparison, "eval/perplexity", "perplexity", "Held-out perplexity", "perplexity"),
        _over_time(comparison, "kl/coef", "beta", "Beta, the KL coefficient", "beta"),
        _over_time(comparison, "objective/gold", "gold", "Gold score", "gold"),
    ]
    return [chart for chart in charts if chart is not None]


def _over_time(
    comparison: Comparison, key: str, slug: str, title: str, unit: str, target: float | None = None
) -> Chart | None:
    """A key over the updates, with the target if there is one; beta without a band."""
    styles, is_beta = variant_styles(comparison), key == "kl/coef"
    curves = {variant.name: curve for variant in comparison.variants if (curve := variant.series(key))[0]}
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel=unit)
        if is_beta and all(min(mean) > 0 for _, mean, _, _ in curves.values()):
            axes.set_yscale("log")
        if target is not None:
            if any(max(high) > 5 * target for *_, high in curves.values()):
                axes.set_yscale("log")
            plot_target(axes, target)
        for name, (x, mean, *band) in curves.items():
            plot_line(axes, x, mean, styles[name].tint, *([] if is_beta else band), label=name, ls=styles[name].dash)

    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    caption = "Means over seeds with one standard deviation." if several else "One seed."
    caption += " The band is the target ± 25 %." if target is not None else ""
    places = columns(UPDATE, [(name, x, mean) for name, (x, mean, _, _) in curves.items()])
    return Chart(slug, title, draw, places, "Means over seeds." if is_beta else caption)


def held_charts(comparison: Comparison) -> list[Chart]:
    """One small chart a variant, by family: KL over target of every seed, with the figures that judge it."""
    styles = variant_styles(comparison)
    variants = [variant for family in comparison.families.values() for variant in family]
    return [_held_chart(variant, f"held-{i}", styles[variant.name].tint) for i, variant in enumerate(variants)]


def held_columns(comparison: Comparison) -> int:
    """Charts side by side: three where every family has three variants, so that each has its line."""
    sizes = {len(family) for family in comparison.families.values()}
    return 3 if sizes == {3} else 2


def _held_chart(variant: Variant, slug: str, tint: str) -> Chart:
    curves = [
        (f"seed {seed}", [float(row["step"]) for row in run.updates], [min(ratio, 1.5 * TOP) for ratio in run.ratios])
        for seed, run in variant.runs.items()
    ]

    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel="KL / target", ylim=(0.0, TOP))
        plot_target(axes, 1.0, label="")
        for _, x, y in curves:
            plot_line(axes, x, y, tint, linewidth=1.1)

    good = sum(figures.held is True for figures in variant.figures.values())
    words = ("held", "missed") if variant.is_controlled else ("at the target", "off the target")
    missed = f"{good} of {len(variant.runs)} {words[0]}" if good else words[1]
    title = variant.name + {None: "", True: f": {words[0]}", False: f": {missed}"}[variant.held]
    highest = max((ratio for run in variant.runs.values() for ratio in run.ratios), default=0.0)
    subtitle = f"tail error {format_number(variant.mean('tail_error'), 2)}"
    subtitle += f", up to {format_number(highest, 2)}x" if highest > TOP else ""
    if (cost := variant.mean("perplexity_cost")) is not None:
        subtitle += f" · perplexity {format_percent(cost, signed=True)}"
    return Chart(slug, title, draw, columns(UPDATE, curves), subtitle=subtitle)
