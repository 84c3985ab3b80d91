"""The charts of a run and of a comparison: over the updates, and the runs' ends against KL, beta and target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_kl.control import adjusts
from rlhf_kl.control.verdict import BAND
from rlhf_kl.report.comparison import Comparison, Variant
from rlhf_kl.report.drawing import MANY, ORDERED, Chart, Line, log_if_wide, marks, with_values
from rlhf_kl.report.one_run import RunResult
from rlhf_kl.report.sentences import outcome
from rlhf_kl.report.sweep import PAIRS, PERPLEXITY, Sweep, spread
from rlhf_kl.text import format_number, format_percent, read_number, scorer_label

DASHES = ("solid", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
TOP = 3.0  # upper limit of a KL/target axis: the subtitle gives a higher peak
LOW = 30.0  # a log axis of the KL begins so many times below the target
KL_OVER_TARGET = "KL over its target"
TRUE = "gold"  # the scorer that is drawn beside the score, and the tint of all that never train
IN_EVALUATIONS = "mean over the prompts of the evaluations, with one standard error."
ROOT_KL = "√KL (KL in nats per response)"


class Style(NamedTuple):
    """How a variant is drawn everywhere."""

    tint: str
    dash: Any
    marker: str


def variant_styles(comparison: Comparison) -> dict[str, Style]:
    """A hue of the ordered scale for every variant, of up to twelve hues for more than six.

    Of more than twelve some share a hue, with another dash and another marker.
    """
    names = [variant.name for variant in comparison.variants]
    few = len(names) <= len(ORDERED)

    def style(i: int) -> Style:
        again = i // len(MANY)
        hue = ORDERED[i * len(ORDERED) // len(names)] if few else MANY[i % len(MANY)]
        dash = "solid" if few else DASHES[(i % 2 + 2 * again) % len(DASHES)]
        return Style(hue, dash, MARKERS[(i + again) % len(MARKERS)])

    return {name: style(i) for i, name in enumerate(names)}


# ---- one run


def run_charts(run: RunResult) -> list[Chart]:
    """All charts that the run has figures for."""
    others = [
        Chart(f"eval-{name}", name, name, [_of_scorer(run, name)], f"It never trains: {IN_EVALUATIONS}")
        for name in run.scorers
        if name != TRUE
    ]
    return with_values([_kl(run), _score(run), *others, _perplexity(run), _beta(run)])


def _kl(run: RunResult) -> Chart:
    """KL with its target, the band around it, the ceiling and the alerts."""
    x, y = run.series(f"kl/{run.unit}")
    target = run.config.kl.target_value
    alerts = [(x, y) for row, x, y in zip(run.updates, x, y, strict=False) if row.get("alerts")]
    log = log_if_wide(target, max(y, default=0.0))
    return Chart(
        "kl",
        f"KL to the reference, per {run.unit}",
        f"nats per {run.unit}",
        [Line("mean", "kl", x, y), marks("alert", "alert", *_columns(alerts), "^")],
        f"The band is the target ± {100 * BAND:g} %.",
        log=log,
        ylim=(target / LOW, 1.3 * max(y)) if log else None,  # the KL of the start is rounding
        target=target,
        ceiling=read_number(run.updates[-1], "kl/ceiling") if run.updates else None,
    )


def _score(run: RunResult) -> Chart:
    """Score with the middle 80 % of the responses, and the true score."""
    scores, true = run.series("objective/scores"), _of_scorer(run, TRUE)
    deciles = [row["objective/scores_deciles"] for row in run.updates if row.get("objective/scores_deciles")]
    if len(deciles) < len(scores[0]):
        deciles = []
    low, high = ([values[i] for values in deciles] for i in (1, 9))
    caption = "Means of each batch" + (", and the middle 80 % of the scores." if deciles else ".")
    caption += f" True score: {IN_EVALUATIONS}" * bool(true.x)
    return Chart("score", "Score", "score", [Line("score", "score", *scores, low, high), true], caption)


def _of_scorer(run: RunResult, name: str) -> Line:
    """What a scorer that never trains found in each evaluation, with its standard error where all have one."""
    (x, y), (_, errors) = run.series(f"eval/{name}"), run.series(f"eval/{name}_stderr")
    known = list(zip(y, errors, strict=False)) if len(errors) == len(y) else []
    low, high = ([mean + sign * error for mean, error in known] for sign in (-1, 1))
    return Line(scorer_label(name), TRUE, x, y, low, high)


def _perplexity(run: RunResult) -> Chart | None:
    """What the run cost on other texts, both in nats per token."""
    x, perplexities = run.series("eval/perplexity")
    if not x:
        return None
    lost = Line("held-out texts", "perplexity", x, [math.log(value / perplexities[0]) for value in perplexities])
    forgotten = Line("forgetting", "s3", *run.series("eval/forward_kl_token"), dash=DASHES[1])
    first, last = format_number(perplexities[0]), format_number(perplexities[-1])
    caption = f"Log of the held-out perplexity over its start: {first} -> {last}."
    if forgotten.x:
        caption += " Forgetting: KL of the reference to the policy, on the reference's samples."
    return Chart("perplexity", "Perplexity and forgetting", "nats per token", [lost, forgotten], caption)


def _beta(run: RunResult) -> Chart:
    x, beta = run.series("kl/coef")
    log = log_if_wide(min(beta, default=0.0), max(beta, default=0.0))
    kind = run.config.kl.controller.kind
    caption = "Beta is constant; the KL follows from it."
    if adjusts(kind):
        caption = f"Beta moves by design: the controller ({kind}) changes it so that the KL stays at its target."
    elif kind == "schedule":
        caption = "Beta follows a schedule, whatever the KL is."
    return Chart("beta", "Beta, the KL coefficient", "beta", [Line("beta", "beta", x, beta)], caption, log=log)


def _total_reward(gains: Sequence[tuple[float, float]], betas: Sequence[float]) -> Chart:
    """Score gain - beta * KL over KL, a line for each beta: where a line is highest, that beta leads.

    gains: (KL of a response in nats, gain over the reference) of the variants, in any order.
    """
    lines = []
    for i, beta in enumerate(betas):
        totals = [(kl, gain - beta * kl) for kl, gain in sorted(gains)]
        tint, best = ORDERED[i * len(ORDERED) // len(betas)], max(totals, key=lambda point: point[1])
        lines += [Line(f"beta {beta:.2g}", tint, *_columns(totals)), marks("", tint, [best[0]], [best[1]], "D")]
    caption = "Ends of the variants, means over seeds. Diamond: the highest total of a beta."
    title, label = "Total reward against KL", "KL, nats per response"
    return Chart("total-reward", title, "score gain - beta · KL", lines, caption, xlabel=label)


# ---- a comparison


def held_charts(comparison: Comparison) -> list[Chart]:
    """One small chart for each variant, by family: KL over target of every seed, titled by its name and verdict."""
    charts: list[Chart] = []
    for variant in (variant for family in comparison.families.values() for variant in family):
        # Without a penalty the line is over the target that the config names.
        found = "no penalty" if variant.constant_coef == 0 else outcome(variant)
        if variant.verdicts:
            found += f", {format_percent(variant.mean('tail_error'))} off"
        runs = [(run, "kl", "") for run in variant.runs.values()]
        charts.append(ratio_chart(f"held-{len(charts)}", f"{variant.name}: {found}", runs))
    return charts


def ratio_chart(slug: str, title: str, runs: Sequence[tuple[RunResult, str, str]]) -> Chart:
    """KL over target of runs, each with a colour and a label; above them the highest where the axis ends below it."""
    highest = max((ratio for run, _, _ in runs for ratio in run.ratios), default=0.0)
    figures = f"up to {format_number(highest, 2)}x" if highest > TOP else ""
    lines = [
        Line(label, tint, [row["step"] for row in run.updates], [min(ratio, 1.5 * TOP) for ratio in run.ratios])
        for run, tint, label in runs
    ]
    return Chart(slug, title, "KL / target", lines, subtitle=figures, ylim=(0.0, TOP), target=1.0)


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Means over seeds by update, and score against sqrt(KL)."""
    scorers = [(name, scorer_label(name)) for name in comparison.scorers]
    charts = [
        _over_time(comparison, "objective/scores", "score", "Score"),
        *(_over_time(comparison, f"eval/{one}", f"eval-{one}", f"Held-out {label}", label) for one, label in scorers),
        _over_time(comparison, "eval/perplexity", "perplexity", "Held-out perplexity"),
        _over_time(comparison, "kl/coef", "beta", "Beta, the KL coefficient"),
        _frontier(comparison),
    ]
    if sweep := comparison.sweep:
        pairs = [(v.mean("kl_sequence"), v.mean("score_gain")) for v in sweep]
        ends = [(kl, gain) for kl, gain in pairs if kl is not None and gain is not None]
        betas = [variant.constant_coef or 0.0 for variant in sweep]
        total = _total_reward([(0.0, 0.0), *ends], betas) if ends else None
        charts += [_kl_over_beta(sweep, variant_styles(comparison)), total]
    return with_values(charts)


def _over_time(comparison: Comparison, key: str, slug: str, title: str, label: str = "") -> Chart:
    """A key over the updates, each variant's mean with one standard deviation."""
    styles = variant_styles(comparison)
    lines = [Line(v.name, styles[v.name].tint, *v.series(key), styles[v.name].dash) for v in comparison.variants]
    caption = spread(comparison)
    log, values = "", [value for line in lines for value in line.y if value > 0]
    if key == "kl/coef" and (log := log_if_wide(min(values, default=0.0), max(values, default=0.0))):
        lines = [line._replace(low=(), high=()) for line in lines if min(line.y, default=0.0) > 0]
        caption += " On a log scale, without a beta of 0."
    return Chart(slug, title, label or slug, lines, caption, log=log)


def _frontier(comparison: Comparison) -> Chart | None:
    """Score over sqrt(KL) at the ends of the runs, a point for each seed, with the upper limit."""
    styles, reference = variant_styles(comparison), _reference(comparison.variants)
    lines = [
        marks(variant.name, styles[variant.name].tint, *_columns(list(ends.values())), styles[variant.name].marker)
        for variant in comparison.variants
        if (ends := comparison.ends(variant))
    ]
    if not lines:
        return None
    caption = "Each point is the end of one run."
    if tilt := _tilt(reference):
        lines.append(Line("upper limit", "ink", [math.sqrt(kl) for _, kl, _ in tilt], [gain for *_, gain in tilt]))
        caption += " Solid: the most that any policy can gain at a KL, by the reference's samples, as far as they tell."
    if best := reference.get("best_of_n"):
        x, y = [math.sqrt(point["kl_bound"]) for point in best], [point["gain"] for point in best]
        lines.append(Line("best of n", "muted", x, y, dash=DASHES[1], marker="."))
        caption += f" Dashed: the best of n samples of the reference, for n up to {best[-1]['n']}."
    return Chart("frontier", "Score against KL", "score gain, in reference sd", lines, caption, xlabel=ROOT_KL)


def _kl_over_beta(variants: Sequence[Variant], styles: Mapping[str, Style]) -> Chart:
    """The KL at the end of each run by its beta, with the tilt of the reference's samples."""
    ends = [(v.name, run.figures["beta"], run.figures["kl_sequence"]) for v in variants for run in v.runs.values()]
    ends = [(name, beta, kl) for name, beta, kl in ends if beta and kl]
    low, high = min((beta for _, beta, _ in ends), default=0), max((beta for _, beta, _ in ends), default=0)
    tilt = [(coef, kl) for coef, kl, _ in _tilt(_reference(variants)) if low <= 1.6 * coef <= 2.56 * high and kl > 0]
    lines = [marks("", styles[name].tint, [beta], [kl]) for name, beta, kl in ends]
    lines.append(Line("best policy", "ink", *_columns(tilt), marker=""))
    caption = "Points: runs. Line: the best policy for each beta, estimated from the reference's samples."
    title, unit = "KL at the end against beta", "nats per response"
    return Chart("kl-beta", title, unit, lines, caption, xlabel="beta", log="xy")


def target_charts(sweep: Sweep | None) -> list[Chart]:
    """Score and those of the scorers that never train, and what they cost, by KL target; empty without a sweep."""
    if sweep is None:
        return []

    def line(name: str, label: str, tint: str) -> Line:
        points = [(point.target, *point.figures[name]) for point in sweep.points]
        known = [(x, mean, error or 0.0) for x, mean, error in points if mean is not None]
        low, high = [mean - error for _, mean, error in known], [mean + error for _, mean, error in known]
        return Line(label, tint, *_columns([(x, mean) for x, mean, _ in known]), low, high, marker="o")

    def level(name: str, factor: float, label: str, tint: str) -> Line:
        value = sweep.reference[name]
        ends = [sweep.points[0].target, sweep.points[-1].target] if value is not None else []
        return Line(label, tint, ends, [factor * (value or 0.0)] * len(ends), dash=DASHES[1], marker="")

    def levels(name: str, limit: float) -> list[Line]:
        return [level(name, 1.0, "reference", "muted"), level(name, limit, "limit", "alert")]

    others = {name: line(name, scorer_label(name), TRUE) for name in sweep.scorers}
    score = [line("scores", "score", "score"), *filter(None, [others.pop(TRUE, None)])]
    perplexity, pairs = line("perplexity", "perplexity", "perplexity"), line("distinct_2", "distinct pairs", "s2")
    forgetting = line("forward_kl_token", "forgetting", "perplexity")
    panels = [
        ("score", score, sweep.note),
        *((name, [found], "") for name, found in others.items()),
        ("perplexity", [perplexity, *levels("perplexity", PERPLEXITY)], "Of held-out texts."),
        ("nats per token", [forgetting], "KL of the reference to the policy, on its own samples."),
        ("share of all", [pairs, *levels("distinct_2", PAIRS)], "Pairs of words in held-out responses."),
    ]
    charts: list[Chart] = []
    for unit, lines, words in panels:
        lines = [each for each in lines if lines[0].x and each.x]
        title = "; ".join(_found(each) for each in lines if each.low)
        title = title[:1].upper() + title[1:]
        values = [value for each in lines for value in each.y]
        log = log_if_wide(min(values, default=0.0), max(values, default=0.0)) if unit == "perplexity" else ""
        # An error may reach below 0: it leaves the axis.
        ylim = (0.8 * min(values), 1.25 * max([*values, *perplexity.high])) if log else None
        label = f"KL target, nats per {sweep.unit}"
        charts.append(
            Chart(f"targets-{len(charts)}", title, unit, lines, words, xlabel=label, log=f"x{log}", ylim=ylim)
        )
    return with_values(charts)


def _found(line: Line) -> str:
    """Where a figure is highest if that is between its ends, else how it goes from one to the other."""
    highest = line.y.index(max(line.y))
    if 0 < highest < len(line.y) - 1:
        return f"{line.label}: highest at {line.x[highest]:g}"
    return f"{line.label}: {format_number(line.y[0])} to {format_number(line.y[-1])}"


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
