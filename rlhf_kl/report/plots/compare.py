"""The charts of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_kl.report import control
from rlhf_kl.report.compare import Comparison, Variant
from rlhf_kl.report.plots.chart import Chart, Level, Line
from rlhf_kl.report.plots.style import DASHES, HUES, MARKERS, ORDERED
from rlhf_kl.report.run import RunResult, number
from rlhf_kl.report.text import percent, shown
from rlhf_kl.report.verdict import held

UPDATE = "update"
TOP = 3.0  # of a KL/target axis: what lies above is named in words
ROOT_KL = "√KL, nats per response"
BETAS = (0.0, 0.1, 0.2, 0.5, 1.0)  # of the total-reward lines


@dataclass(frozen=True)
class Look:
    """How a variant is drawn everywhere."""

    colour: str
    dash: Any
    marker: str


def looks(comparison: Comparison) -> dict[str, Look]:
    """A hue for every family and a dash for every member; one large family gets an ordered scale instead."""
    families = list(comparison.families.values())
    found = {}
    if len(families) == 1 and len(families[0]) > len(DASHES):
        ordered = sorted(families[0], key=lambda variant: variant.constant_coef or 0.0)
        for i, variant in enumerate(ordered):
            place = round(i * (len(ORDERED) - 1) / (len(ordered) - 1))
            found[variant.name] = Look(ORDERED[place], DASHES[0], MARKERS[i % len(MARKERS)])
        return found
    for hue, members in enumerate(families):
        for i, variant in enumerate(members):
            found[variant.name] = Look(HUES[hue % len(HUES)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
    return found


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Curves over time, means over seeds with one standard deviation."""
    look = looks(comparison)
    target = comparison.target
    kl = _over_time(
        comparison, look, f"kl/{comparison.unit}", "kl", "KL to the reference", f"nats per {comparison.unit}"
    )
    if target is not None:
        highest = max((max(line.high or line.y, default=0.0) for line in kl.lines), default=0.0)
        kl = Chart(
            kl.slug, kl.title, kl.x_label, kl.y_label, kl.lines,
            band=((1 - control.BAND) * target, (1 + control.BAND) * target),
            levels=[Level(target, "target", "c3")],
            log_y=highest > 5 * target,
            caption=f"{_spread(comparison)} The band is the target ± 25 %.",
        )  # fmt: skip
    beta = _over_time(comparison, look, "kl/coef", "beta", "Beta, the KL coefficient", "beta")
    beta = Chart(
        beta.slug, beta.title, beta.x_label, beta.y_label, [_without_band(line) for line in beta.lines],
        log_y=all(min(line.y, default=0.0) > 0 for line in beta.lines), caption="Means over seeds.",
    )  # fmt: skip
    charts = [
        kl,
        _over_time(comparison, look, "objective/scores", "score", "Score", "score of the reward"),
        _over_time(comparison, look, "eval/perplexity", "perplexity", "Held-out perplexity", "perplexity"),
        beta,
        _over_time(comparison, look, "objective/gold", "gold", "Gold score", "gold"),
    ]
    return [chart for chart in charts if not chart.empty]


def frontier_charts(comparison: Comparison) -> list[Chart]:
    """Where the runs end: score and gold against sqrt(KL), every seed a point, beside what KL can buy at best."""
    look = looks(comparison)
    charts = [
        _frontier(comparison, look, "score_gain", "frontier", "Score against KL", "score gain, in reference sd"),
        _frontier(comparison, look, "gold_gain", "frontier-gold", "Gold against KL", "gold gain"),
    ]
    if comparison.sweep:
        charts += [kl_against_beta(comparison.sweep, look), total_reward(comparison, look)]
    return [chart for chart in charts if not chart.empty]


def held_charts(comparison: Comparison) -> list[Chart]:
    """One small chart a variant: KL over target of every seed, with what it came to."""
    look = looks(comparison)
    charts: list[Chart] = []
    for variant in _side_by_side(comparison):
        lines = []
        for seed, run in variant.runs.items():
            steps = [float(row["step"]) for row in run.updates]
            values = [min(value, 1.5 * TOP) for value in run.ratios]
            lines.append(Line(f"seed {seed}", steps, values, look[variant.name].colour, width=1.1, named=False))
        highest = max((value for run in variant.runs.values() for value in run.ratios), default=0.0)
        ok = held(variant)
        good = sum(error <= control.BAND for error in variant.values("tail_error"))
        some = "missed" if not good else f"held in {good} of {len(variant.runs)} seeds"
        word = "" if ok is None else "held" if ok else some
        above = f", up to {shown(highest, 2)}x" if highest > TOP else ""
        cost = variant.mean("perplexity_cost")
        charts.append(
            Chart(
                f"held-{len(charts)}", f"{variant.name}: {word}" if word else variant.name, UPDATE, "KL / target",
                lines,
                band=(1 - control.BAND, 1 + control.BAND), levels=[Level(1.0, "", "c3")], y_limits=(0.0, TOP),
                subtitle=f"tail error {shown(variant.mean('tail_error'), 2)}{above}"
                + (f" · perplexity {percent(cost, signed=True)}" if cost is not None else ""),
            )
        )  # fmt: skip
    return charts


def _side_by_side(comparison: Comparison) -> list[Variant]:
    """Two families of one size in two columns, else the order of the comparison."""
    families = list(comparison.families.values())
    if len(families) == 2 and len(families[0]) == len(families[1]):
        return [variant for pair in zip(*families, strict=True) for variant in pair]
    return comparison.variants


def kl_against_beta(sweep: Sequence[Variant], look: Mapping[str, Look]) -> Chart:
    """The KL at the end by beta, beside the tilt of the reference's samples and the Gaussian law."""
    lines = []
    for variant in sweep:
        settled: list[tuple[float, float, int]] = []
        moving: list[tuple[float, float, int]] = []
        for seed, found in variant.figures.items():
            coef = variant.runs[seed].constant_coef
            if coef and found.kl_sequence:
                (settled if found.settled else moving).append((coef, found.kl_sequence, seed))
        style = look[variant.name]
        for points, hollow, word in ((settled, False, "settled"), (moving, True, "still moving")):
            if points:
                lines.append(
                    Line(
                        variant.name, [p[0] for p in points], [p[1] for p in points], style.colour, points=True,
                        hollow=hollow, named=False,
                        tips=[f"{variant.name}, seed {s}: KL {shown(kl)} at beta {coef:g}, {word}"
                              for coef, kl, s in points],
                    )
                )  # fmt: skip
    first = _with_reference(sweep)
    tilt, spread = tilt_curve(first), reference_spread(first)
    betas = [coef for variant in sweep if (coef := variant.constant_coef)]
    low, high = min(betas) / 1.6, max(betas) * 1.6
    reachable = [(coef, kl) for coef, kl, _ in tilt if low <= coef <= high and kl > 0]
    if reachable:
        lines.append(Line("tilt", [p[0] for p in reachable], [p[1] for p in reachable], "ink", marker="None"))
    if spread:
        most = 3 * max((max(line.y) for line in lines), default=1.0)
        left = max(low, spread / math.sqrt(2 * most))  # the law goes through the roof where scores saturate
        ends = [spread**2 / (2 * beta**2) for beta in (left, high)]
        lines.append(Line("Gaussian law", [left, high], ends, "muted", dash=DASHES[1], marker="None"))
    caption = (
        "Hollow: the KL had not come to rest. Solid line: the reference's samples tilted by exp(score/beta), the "
        "optimum of score - beta*KL, as far as the samples tell. Dashed: σ²/(2β²), for Gaussian scores."
    )
    return Chart(
        "kl-beta", "KL at the end against beta", "beta", "nats per response", lines, log_x=True, log_y=True,
        caption=caption, legend=True,
    )  # fmt: skip


def total_reward(comparison: Comparison, look: Mapping[str, Look]) -> Chart:
    """What each run's end is worth, score - beta*KL, for several beta; the tilt is the limit."""
    lines = []
    grid = [i * max(BETAS) / 40 for i in range(41)]
    for variant in comparison.sweep:
        gain, kl = variant.mean("score_gain"), variant.mean("kl_sequence")
        if gain is not None and kl is not None:
            worth = [gain - beta * kl for beta in grid]
            lines.append(Line(variant.name, grid, worth, look[variant.name].colour, width=1.3))
    best = max((max(line.y) for line in lines), default=1.0)
    first = _with_reference(comparison.sweep)
    tilt = [(coef, gain - coef * kl) for coef, kl, gain in tilt_curve(first) if coef <= max(BETAS)]
    if tilt:
        tilt.sort()
        lines.append(Line("limit", [t[0] for t in tilt], [t[1] for t in tilt], "ink", dash=DASHES[1], marker="None"))
    return Chart(
        "total-reward", "Total reward by beta", "beta that pays for KL", "score gain - beta · KL", lines,
        y_limits=(-0.75 * best, 1.15 * max(best, *(t[1] for t in tilt or [(0.0, best)]))),
        caption="Every line is the end of one variant's runs (mean over seeds): how much it is worth where a nat costs "
        "beta. Dashed: the best that any policy could reach, as far as the reference's samples tell.",
    )  # fmt: skip


def _frontier(
    comparison: Comparison, look: Mapping[str, Look], measure: str, slug: str, title: str, unit: str
) -> Chart:
    lines = []
    reach = 0.0
    for variant in comparison.variants:
        points = [
            (math.sqrt(found.kl_sequence), getattr(found, measure), seed)
            for seed, found in variant.figures.items()
            if found.kl_sequence is not None and getattr(found, measure) is not None
        ]
        if points:
            style = look[variant.name]
            reach = max(reach, *(x for x, _, _ in points))
            lines.append(
                Line(
                    variant.name, [p[0] for p in points], [p[1] for p in points], style.colour, points=True,
                    marker=style.marker,
                    tips=[f"{variant.name}, seed {s}: √KL {shown(x)}, gain {shown(y)}" for x, y, s in points],
                )
            )  # fmt: skip
    if not lines:
        return Chart(slug, title, ROOT_KL, unit, [])
    first = _with_reference(comparison.variants)
    caption = "Every seed's end is a point."
    if measure == "score_gain" and (tilt := tilt_curve(first)):
        xs = [math.sqrt(kl) for _, kl, _ in tilt]
        lines.append(Line("upper limit", xs, [gain for _, _, gain in tilt], "ink"))
        caption += " Solid: the most score that a KL can buy (the reference's samples, tilted by exp(score/beta))."
    key = "gain" if measure == "score_gain" else "gold_gain"
    best = [(math.sqrt(p["kl_bound"]), p[key], p["n"]) for p in best_of_n_points(first) if p.get(key) is not None]
    if best:
        xs, ys = [p[0] for p in best], [p[1] for p in best]
        lines.append(Line("best of n", xs, ys, "muted", dash=DASHES[1], marker="None"))
        tips = [f"best of {n}: √KL at most {shown(x)}, gain {shown(y)}" for x, y, n in best]
        lines.append(Line("", xs, ys, "muted", points=True, marker=".", tips=tips, named=False))
        caption += f" Dashed: best of n reference samples, n = 1 to {best[-1][2]}, at the upper bound of its KL, "
        caption += "log n - (n-1)/n."
    return Chart(slug, title, ROOT_KL, unit, lines, caption=caption, legend=True)


def _with_reference(variants: Sequence[Variant]) -> RunResult:
    """The first run whose summary has the reference's samples; all runs of a comparison share the reference."""
    runs = [run for variant in variants for run in variant.runs.values()]
    return next((run for run in runs if run.summary.get("reference")), runs[0])


def tilt_curve(run: RunResult) -> list[tuple[float, float, float]]:
    """(beta, sequence KL, score gain) of the tilted reference samples."""
    kept = run.summary.get("reference")
    points = kept.get("tilt") if isinstance(kept, Mapping) else None
    return [(point["coef"], point["kl"], point["gain"]) for point in points or []]


def best_of_n_points(run: RunResult) -> list[dict[str, Any]]:
    """The best-of-n curve of the reference samples."""
    kept = run.summary.get("reference")
    points = kept.get("best_of_n") if isinstance(kept, Mapping) else None
    return list(points or [])


def reference_spread(run: RunResult) -> float | None:
    """Spread of the reference's scores within prompts."""
    kept = run.summary.get("reference")
    return number(kept, "scores_spread") if isinstance(kept, Mapping) else None


def _over_time(comparison: Comparison, look: Mapping[str, Look], key: str, slug: str, title: str, unit: str) -> Chart:
    lines = []
    for variant in comparison.variants:
        x, means, low, high = variant.series(key)
        if x:
            style = look[variant.name]
            lines.append(Line(variant.name, x, means, style.colour, style.dash, low=low, high=high))
    return Chart(slug, title, UPDATE, unit, lines, caption=_spread(comparison))


def _spread(comparison: Comparison) -> str:
    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    return "Means over seeds with one standard deviation." if several else "One seed."


def _without_band(line: Line) -> Line:
    return Line(line.label, line.x, line.y, line.colour, line.dash)
