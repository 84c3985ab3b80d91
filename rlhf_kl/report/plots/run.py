"""The charts of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlhf_kl.report import control
from rlhf_kl.report.overoptimisation import gold_against_kl, gold_peak, reference_perplexity
from rlhf_kl.report.plots.chart import Chart, Level, Line, Mark
from rlhf_kl.report.run import RunResult, Series, number
from rlhf_kl.report.text import shown

UPDATE = "update"
LOG_FROM = 5.0  # a KL that reaches so many times its target, or a beta that varies so much, has a log axis


def run_charts(run: RunResult) -> list[Chart]:
    """All charts that the run has figures for."""
    charts = [
        kl_chart(run),
        beta_chart(run),
        score_chart(run),
        _simple(run, "objective/gold", "gold", "Gold score", "gold", "c3"),
        perplexity_chart(run),
        distribution_chart(run),
        _simple(run, "rollout/response_length", "length", "Response length", "tokens", "c4"),
        replace(
            _simple(run, "rollout/eos_rate", "eos", "Responses that end by themselves", "share with an EOS", "c5"),
            y_limits=(0, 1.04),
        ),
        position_chart(run),
    ]
    return [chart for chart in charts if not chart.empty]


def overoptimisation_charts(run: RunResult) -> list[Chart]:
    """Score and gold against sqrt(KL) where there is gold, and the stand-ins."""
    distinct = run.series("eval/distinct_2")
    charts = [
        frontier_chart(run),
        _series_chart(
            reference_perplexity(run),
            Chart(
                "reference-perplexity", "Samples under the reference", UPDATE, "perplexity", [],
                caption="How strange the policy's own samples are to the reference: exp(entropy + KL).",
            ),
            "c2",
        ),
        _series_chart(
            distinct,
            Chart(
                "distinct", "Distinct word pairs", UPDATE, "distinct-2", [],
                caption="Share of word pairs that differ, over the responses to the held-out prompts. "
                "It falls when responses become alike.",
            ),
            "c3",
        ),
        _series_chart(
            run.series("rollout/score_length_corr"),
            Chart(
                "score-length", "Score and length", UPDATE, "correlation", [], levels=[Level(0.0, "none")],
                caption="Correlation of score and length within a batch: a reward model that pays for length "
                "shows here.",
            ),
            "c4",
        ),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.empty]


def kl_chart(run: RunResult) -> Chart:
    """KL with its target, the band around it, the ceiling and the alerts."""
    steps, values = run.series(f"kl/{run.unit}")
    high = max(values, default=0.0) > LOG_FROM * run.target
    ceiling = number(run.updates[-1], "kl/ceiling") if run.updates else None
    levels = [Level(run.target, "target", "c3")]
    if ceiling is not None:
        levels.append(Level(ceiling, "ceiling", "alert"))
    return Chart(
        "kl",
        f"KL to the reference, per {run.unit}",
        UPDATE,
        f"nats per {run.unit}",
        [Line("KL", steps, values, "c1", named=False)],
        band=((1 - control.BAND) * run.target, (1 + control.BAND) * run.target),
        levels=levels,
        marks=alert_marks(run),
        log_y=high,
        caption="The band is the target ± 25 %." + (" Red marks are alerts." if alert_marks(run) else ""),
    )


def beta_chart(run: RunResult) -> Chart:
    """Beta over the run."""
    steps, values = run.series("kl/coef")
    varies = min(values, default=0.0) > 0 and max(values) > LOG_FROM * min(values)
    return Chart(
        "beta", "Beta, the KL coefficient", UPDATE, "beta", [Line("beta", steps, values, "c2", named=False)],
        log_y=varies, caption=f"Controller: {run.config.kl.controller.kind}.",
        y_limits=None if len(set(values)) != 1 else (0.0, 2.0 * values[0] or 1.0),
    )  # fmt: skip


def score_chart(run: RunResult) -> Chart:
    """The raw score with the middle 80 % of the responses."""
    rows = [row for row in run.updates if number(row, "objective/scores") is not None]
    steps = [float(row["step"]) for row in rows]
    deciles = [_deciles(row) for row in rows]
    banded = bool(rows) and all(deciles)
    line = Line(
        "score",
        steps,
        [row["objective/scores"] for row in rows],
        "c1",
        low=[found[1] for found in deciles if found] if banded else None,
        high=[found[9] for found in deciles if found] if banded else None,
        named=False,
    )
    caption = "Mean of each batch" + (", and the middle 80 % of its responses." if banded else ".")
    return Chart("score", "Score", UPDATE, "score of the reward", [line], caption=caption)


def perplexity_chart(run: RunResult) -> Chart:
    """Held-out perplexity with that of the start."""
    steps, values = run.series("eval/perplexity")
    return Chart(
        "perplexity", "Held-out perplexity", UPDATE, "perplexity",
        [Line("perplexity", steps, values, "c4", named=False)],
        levels=[Level(values[0], "start")] if values else [],
        caption="What the policy still knows of its language: lower is better.",
    )  # fmt: skip


def distribution_chart(run: RunResult) -> Chart:
    """Cumulative distribution of the scores at the start and at the end, from the deciles of the batches."""
    first = _mean_deciles(run.updates[: max(1, min(control.END, len(run.updates) // 4))])
    last = _mean_deciles(control.end(run.updates))
    shares = [10.0 * i for i in range(11)]
    lines = []
    if first and last:
        lines = [
            Line("start", first, shares, "muted", dash=(0, (5, 2)), tips=None),
            Line("end", last, shares, "c1"),
        ]
    return Chart(
        "distribution", "Distribution of scores", "score", "% of responses below", lines, legend=True,
        y_limits=(0, 100), caption="Deciles of the batches at the start (dashed) and at the end.",
    )  # fmt: skip


def position_chart(run: RunResult) -> Chart:
    """KL by position in the response at the end of the run."""
    curves = [row["kl/per_position"] for row in control.end(run.updates) if row.get("kl/per_position")]
    longest = max(map(len, curves), default=0)
    values = [
        fmean([curve[i] for curve in curves if i < len(curve) and curve[i] is not None] or [0.0])
        for i in range(longest)
    ]
    return Chart(
        "position", "KL by position", "token of the response", "nats",
        [Line("KL", [float(i + 1) for i in range(longest)], values, "c1", named=False)],
        caption="Mean of the last ten updates: where in a response the policy has moved.",
    )  # fmt: skip


def frontier_chart(run: RunResult) -> Chart:
    """Score and gold gain against sqrt(KL), the path of the run, with the peak of gold."""
    points, peak = gold_against_kl(run), gold_peak(run)
    xs = [point[0] for point in points]
    tips = [
        f"update {row['step']}: sqrt(KL) {shown(x)}, score {shown(score)}, gold {shown(gold)}"
        for row, (x, score, gold) in zip(run.updates, points, strict=False)
    ]
    lines = []
    if points:
        lines = [
            Line("score", xs, [point[1] for point in points], "c1"),
            Line("gold", xs, [point[2] for point in points], "c3"),
            Line("", xs, [point[2] for point in points], "c3", points=True, drawn=False, tips=tips),
        ]
    caption = "Gains over the reference along the run, means of five updates."
    if peak is not None:
        best = next(point for row, point in zip(run.updates, points, strict=True) if row["step"] == peak.step)
        tip = f"peak of gold, {shown(peak.gold)}, in update {peak.step}"
        lines.append(Line("peak of gold", [best[0]], [best[2]], "alert", points=True, marker="D", tips=[tip]))
        caption += f" Diamond: the {tip}" + (
            f"; at the end it is {shown(peak.gold_end)}: the policy exploits the reward model."
            if peak.passed
            else "; it has not turned down since."
        )
    return Chart("frontier", "Score and gold against KL", "√KL, nats per response", "gain", lines, caption=caption)


def alert_marks(run: RunResult) -> list[Mark]:
    """Updates with alerts."""
    return [Mark(float(row["step"]), _words(row["alerts"])) for row in run.updates if row.get("alerts")]


def _words(alerts: Sequence[str]) -> str:
    return "; ".join(str(alert).partition(":")[0] for alert in alerts)


def _simple(run: RunResult, key: str, slug: str, title: str, unit: str, colour: str) -> Chart:
    return _series_chart(run.series(key), Chart(slug, title, UPDATE, unit, []), colour)


def _series_chart(series: Series, chart: Chart, colour: str) -> Chart:
    return replace(chart, lines=[Line(chart.y_label, *series, colour, named=False)])


def _deciles(row: Mapping[str, Any]) -> list[float] | None:
    found = row.get("objective/scores_deciles")
    if not isinstance(found, list) or len(found) != 11 or not all(isinstance(v, int | float) for v in found):
        return None
    return found


def _mean_deciles(rows: Sequence[Mapping[str, Any]]) -> list[float] | None:
    found = [deciles for row in rows if (deciles := _deciles(row)) is not None]
    return [fmean(column) for column in zip(*found, strict=True)] if found else None
