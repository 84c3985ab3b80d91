"""The charts of a comparison against KL and beta: every run ends in a point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.plots.chart import Axes, Chart, Place, add_legend, columns, plot_line, plot_points
from rlhf_kl.report.plots.style import DASHES
from rlhf_kl.report.plots.variants import variant_styles
from rlhf_kl.report.run import RunResult
from rlhf_kl.report.score_curve import ScoreCurve
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number, read_number

ROOT_KL = "√KL, nats per response"
LARGEST_BETA = 1.0  # of the total-reward lines
STEPS = 80  # of a drawn curve

End = tuple[float, float, int]  # sqrt(KL), gain, seed


def frontier_charts(comparison: Comparison) -> list[Chart]:
    """The ends of the runs: score and gold against sqrt(KL), a point for each seed, with the upper limit."""
    charts = [
        _frontier(comparison, "score_gain", "frontier", "Score against KL", "score gain, in reference sd"),
        _frontier(comparison, "gold_gain", "frontier-gold", "Gold against KL", "gold gain"),
    ]
    if comparison.sweep:
        charts += [_kl_against_beta(comparison), _total_reward(comparison)]
    return [chart for chart in charts if chart is not None]


def _frontier(comparison: Comparison, measure: str, slug: str, title: str, unit: str) -> Chart | None:
    points: dict[str, list[End]] = {}
    for variant in comparison.variants:
        ends = [
            (math.sqrt(figures.kl_sequence), getattr(figures, measure), seed)
            for seed, figures in variant.figures.items()
            if figures.kl_sequence is not None and getattr(figures, measure) is not None
        ]
        if ends:
            points[variant.name] = ends
    if not points:
        return None
    styles, first = variant_styles(comparison), _with_reference(comparison.variants)
    tilt = [(math.sqrt(kl), gain) for _, kl, gain in _tilt_curve(first)] if measure == "score_gain" else []
    key = "gain" if measure == "score_gain" else "gold_gain"
    best = [(math.sqrt(p["kl_bound"]), p[key], p["n"]) for p in first.reference_figures.get("best_of_n") or []
            if p.get(key) is not None]  # fmt: skip

    curves = _curves(comparison, points)

    def draw(axes: Axes) -> None:
        axes.set(xlabel=ROOT_KL, ylabel=unit)
        for name, line in curves.items():
            plot_line(axes, line[0], line[1], styles[name].tint, *line[2:], marker="", linewidth=1.0)
        for name, ends in points.items():
            style = styles[name]
            plot_points(axes, *_columns_of(ends), style.tint, marker=style.marker, label=name)
        if tilt:
            plot_line(axes, *_columns_of(tilt), "ink", label="upper limit")
        if best:
            plot_line(axes, *_columns_of(best), "muted", marker="", ls=DASHES[1], label="best of n")
            plot_points(axes, *_columns_of(best), "muted", marker=".")
        add_legend(axes)

    caption = "Each point is the end of one run."
    if curves:
        caption += " Thin: the curve of the comparison at equal KL (here through means over seeds); its shade is the "
        caption += "uncertainty between the ends."
    if tilt:
        caption += " Solid: the largest possible gain at a KL (the reference's samples, weighted by exp(score/beta))."
    if best:
        caption += f" Dashed: best of n reference samples, n = 1 to {best[-1][2]}, at the upper bound of its KL, "
        caption += "log n - (n-1)/n."
    places = [
        Place(x, y, f"{name}, seed {seed}: √KL {format_number(x)}, gain {format_number(y)}")
        for name, ends in points.items()
        for x, y, seed in ends
    ]
    places += [Place(x, y, f"best of {n}: √KL at most {format_number(x)}, gain {format_number(y)}") for x, y, n in best]
    return Chart(slug, title, draw, places, caption)


def _curves(comparison: Comparison, ends: Mapping[str, Sequence[End]]) -> dict[str, list[list[float]]]:
    """x, gain and its bounds for the curves of the comparison at equal KL; by the first member of the family."""
    used = {entry.curve for entry in comparison.equal_kl if entry.readings and not entry.direct}
    gains = [0.0, *(gain for seeds in ends.values() for _, gain, _ in seeds)]
    curves = {}
    for family, members in comparison.families.items():
        names = [variant.name for variant in members if variant.name in ends]
        if family not in used or len(names) < 2:
            continue
        curve = ScoreCurve([(fmean(x for x, _, _ in ends[name]), fmean(y for _, y, _ in ends[name])) for name in names])
        xs = [curve.last * i / STEPS for i in range(STEPS + 1)]
        readings = [(x, *reading) for x in xs if (reading := curve.at(x)) is not None]  # of ends at one KL: the last
        x, *ys = (list(column) for column in zip(*readings, strict=True))
        curves[names[0]] = [x, *([min(max(y, min(gains)), max(gains)) for y in column] for column in ys)]
    return curves


def _kl_against_beta(comparison: Comparison) -> Chart | None:
    """The KL at the end by beta, with the tilt of the reference's samples and the Gaussian law."""
    sweep, styles = comparison.sweep, variant_styles(comparison)
    points = [
        (coef, figures.kl_sequence, seed, variant.name, bool(figures.settled))
        for variant in sweep
        for seed, figures in variant.figures.items()
        if (coef := variant.runs[seed].constant_coef) and figures.kl_sequence
    ]
    first = _with_reference(sweep)
    spread = read_number(first.reference_figures, "scores_spread")
    betas = [coef for variant in sweep if (coef := variant.constant_coef)]
    low, high = min(betas) / 1.6, max(betas) * 1.6
    tilt = [(coef, kl) for coef, kl, _ in _tilt_curve(first) if low <= coef <= high and kl > 0]
    most = 3 * max([kl for _, kl, *_ in points] + [kl for _, kl in tilt], default=1.0)
    if not (points or tilt or spread):
        return None

    def draw(axes: Axes) -> None:
        axes.set(xlabel="beta", ylabel="nats per response", xscale="log", yscale="log")
        for coef, kl, _, name, settled in points:
            fill = {} if settled else {"markerfacecolor": "none"}
            plot_points(axes, [coef], [kl], styles[name].tint, **fill)
        if tilt:
            plot_line(axes, *_columns_of(tilt), "ink", marker="", label="tilt")
        if spread:  # the Gaussian law has no bound where scores saturate
            ends = [max(low, spread / math.sqrt(2 * most)), high]
            kls = [spread**2 / (2 * beta**2) for beta in ends]
            plot_line(axes, ends, kls, "muted", marker="", ls=DASHES[1], label="Gaussian law")
        add_legend(axes)

    places = [
        Place(coef, kl, f"{name}, seed {seed}: KL {format_number(kl)} at beta {coef:g}, "
              + ("settled" if settled else "still moving"))
        for coef, kl, seed, name, settled in points
    ]  # fmt: skip
    caption = (
        "Hollow: the KL had not settled. Solid line: the reference's samples weighted by exp(score/beta), the optimum "
        "of score - beta*KL, estimated from these samples. Dashed: σ²/(2β²), for Gaussian scores."
    )
    return Chart("kl-beta", "KL at the end against beta", draw, places, caption)


def _total_reward(comparison: Comparison) -> Chart | None:
    """The total reward of each run's end, score - beta*KL, over beta; the tilt is the limit."""
    styles = variant_styles(comparison)
    betas = [i * LARGEST_BETA / 40 for i in range(41)]
    curves = []
    for variant in comparison.sweep:
        gain, kl = variant.mean("score_gain"), variant.mean("kl_sequence")
        if gain is not None and kl is not None:
            curves.append((variant.name, betas, [gain - beta * kl for beta in betas]))
    best = max((max(worth) for _, _, worth in curves), default=1.0)
    tilt = _tilt_curve(_with_reference(comparison.sweep))
    limit = sorted((coef, gain - coef * kl) for coef, kl, gain in tilt if coef <= LARGEST_BETA)
    if not (curves or limit):
        return None

    def draw(axes: Axes) -> None:
        top = 1.15 * max([best, *(worth for _, worth in limit)])
        axes.set(xlabel="beta that pays for KL", ylabel="score gain - beta · KL", ylim=(-0.75 * best, top))
        for name, x, worth in curves:
            plot_line(axes, x, worth, styles[name].tint, linewidth=1.3, label=name)
        if limit:
            plot_line(axes, *_columns_of(limit), "ink", marker="", ls=DASHES[1], label="limit")

    caption = (
        "Each line is the end of one variant's runs (mean over seeds): its score gain minus beta for each nat of KL. "
        "Dashed: the upper limit for any policy, estimated from the reference's samples."
    )
    places = columns("beta that pays for KL", [*curves, ("limit", *_columns_of(limit))] if limit else curves)
    return Chart("total-reward", "Total reward by beta", draw, places, caption)


def _columns_of(points: Sequence[tuple[Any, ...]]) -> tuple[list[float], list[float]]:
    """x and y of points."""
    return [point[0] for point in points], [point[1] for point in points]


def _with_reference(variants: Sequence[Variant]) -> RunResult:
    """The first run whose summary has the reference's samples; all runs of a comparison share the reference."""
    runs = [run for variant in variants for run in variant.runs.values()]
    return next((run for run in runs if run.reference_figures), runs[0])


def _tilt_curve(run: RunResult) -> list[tuple[float, float, float]]:
    """(beta, sequence KL, score gain) of the tilted reference samples."""
    return [(point["coef"], point["kl"], point["gain"]) for point in run.reference_figures.get("tilt") or []]
