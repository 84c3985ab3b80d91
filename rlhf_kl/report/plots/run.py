"""The charts of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_kl.report import control
from rlhf_kl.report.overoptimisation import gold_against_kl, gold_peak, reference_perplexity
from rlhf_kl.report.plots.chart import (
    UPDATE,
    Axes,
    Chart,
    Place,
    add_legend,
    columns,
    plot_level,
    plot_line,
    plot_points,
    plot_target,
)
from rlhf_kl.report.run import RunResult, Series
from rlhf_kl.run.figures import format_number, read_number

LOG_FROM = 5.0  # a KL over this many times its target, or a beta that varies by this factor, has a log axis


def run_charts(run: RunResult) -> list[Chart]:
    """All charts that the run has figures for."""
    charts = [
        kl_chart(run),
        beta_chart(run),
        score_chart(run),
        bought_chart(run),
        update_chart("gold", "Gold score", "gold", run.series("objective/gold"), "c3"),
        perplexity_chart(run),
        update_chart(
            "forgetting", "Forgetting", "nats per token", run.series("eval/forward_kl_token"), "c2",
            caption="KL of the reference to the policy, on samples of the reference for held-out prompts. "
            "What a policy forgets of other tasks grows with it (2509.04259).",
        ),
        distribution_chart(run),
        update_chart("length", "Response length", "tokens", run.series("rollout/response_length"), "c4"),
        update_chart(
            "eos", "Responses that end by themselves", "share with an EOS", run.series("rollout/eos_rate"), "c5",
            prepare=lambda axes: axes.set_ylim(0, 1.04),
        ),
        position_chart(run),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def overoptimisation_charts(run: RunResult) -> list[Chart]:
    """Score and gold against sqrt(KL) if there is gold, and the indirect signs."""
    charts = [
        frontier_chart(run),
        update_chart(
            "reference-perplexity", "Samples under the reference", "perplexity", reference_perplexity(run), "c2",
            caption="Perplexity of the policy's samples under the reference: exp(entropy + KL).",
        ),
        update_chart(
            "distinct", "Distinct word pairs", "distinct-2", run.series("eval/distinct_2"), "c3",
            caption="Share of word pairs that differ, over the responses to the held-out prompts. "
            "It falls when responses become alike.",
        ),
        update_chart(
            "score-length", "Score and length", "correlation", run.series("rollout/score_length_corr"), "c4",
            prepare=lambda axes: plot_level(axes, 0.0, "none"),
            caption="Correlation of score and length within a batch: it is high if the reward model rewards length.",
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def update_chart(
    slug: str,
    title: str,
    unit: str,
    series: Series,
    tint: str,
    *,
    name: str = "",
    caption: str = "",
    prepare: Callable[[Axes], object] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Chart | None:
    """One curve over the updates; None where it has no values.

    `prepare` sets up the axes before the curve is drawn; `name` of the curve: else `unit`; `marks`: x and text;
    `band`: low and high values around the curve.
    """
    if not series[0]:
        return None

    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel=unit)
        if prepare:
            prepare(axes)
        plot_line(axes, *series, tint, *(band or ()))
        for x, _ in marks:
            plot_points(
                axes, [x], [0.02], "alert", marker="^", markersize=6.8, clip_on=False, zorder=6,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip

    return Chart(slug, title, draw, columns(UPDATE, [(name or unit, *series)], marks), caption)


def kl_chart(run: RunResult) -> Chart | None:
    """KL with its target, the band around it, the ceiling and the alerts."""
    series = run.series(f"kl/{run.unit}")
    ceiling = read_number(run.updates[-1], "kl/ceiling") if run.updates else None
    marks = [
        (float(row["step"]), "; ".join(str(alert).partition(":")[0] for alert in row["alerts"]))
        for row in run.updates
        if row.get("alerts")
    ]

    def prepare(axes: Axes) -> None:
        if max(series[1]) > LOG_FROM * run.target:
            axes.set_yscale("log")
        plot_target(axes, run.target)
        if ceiling is not None:
            plot_level(axes, ceiling, "ceiling", "alert")

    return update_chart(
        "kl", f"KL to the reference, per {run.unit}", f"nats per {run.unit}", series, "c1", name="KL",
        prepare=prepare, marks=marks, caption="The band is the target ± 25 %." + " Red marks are alerts." * bool(marks),
    )  # fmt: skip


def beta_chart(run: RunResult) -> Chart | None:
    """Beta over the run."""
    series = run.series("kl/coef")

    def prepare(axes: Axes) -> None:
        low, high = min(series[1]), max(series[1])
        if low == high:
            axes.set_ylim(0.0, 2.0 * low or 1.0)
        elif 0 < LOG_FROM * low < high:
            axes.set_yscale("log")

    return update_chart(
        "beta", "Beta, the KL coefficient", "beta", series, "c2", prepare=prepare,
        caption=f"Controller: {run.config.kl.controller.kind}.",
    )  # fmt: skip


def score_chart(run: RunResult) -> Chart | None:
    """The raw score with the middle 80 % of the responses."""
    series = run.series("objective/scores")
    rows = [row for row in run.updates if read_number(row, "objective/scores") is not None]
    deciles = [values for row in rows if (values := _deciles(row))]
    band = None
    if len(deciles) == len(rows):
        band = [values[1] for values in deciles], [values[9] for values in deciles]
    return update_chart(
        "score", "Score", "score of the reward", series, "c1", name="score", band=band,
        caption="Mean of each batch" + (", and the middle 80 % of its responses." if band else "."),
    )  # fmt: skip


def bought_chart(run: RunResult) -> Chart | None:
    """The share of the KL that the gain in score needs."""
    return update_chart(
        "bought", "KL bought with score", "share of the KL", run.series("kl/bought"), "c2",
        prepare=lambda axes: axes.set_ylim(0, 1.04),
        caption="The least KL that this gain in score needs, over the KL measured. The rest brought no score.",
    )  # fmt: skip


def perplexity_chart(run: RunResult) -> Chart | None:
    """Held-out perplexity with that of the start."""
    series = run.series("eval/perplexity")
    return update_chart(
        "perplexity", "Held-out perplexity", "perplexity", series, "c4",
        prepare=lambda axes: plot_level(axes, series[1][0], "start"),
        caption="How well the policy still predicts held-out texts: lower is better.",
    )  # fmt: skip


def distribution_chart(run: RunResult) -> Chart | None:
    """Cumulative distribution of the scores at the start and at the end, from the deciles of the batches."""
    first = _mean_deciles(run.updates[: max(1, min(control.END, len(run.updates) // 4))])
    last = _mean_deciles(control.end(run.updates))
    if not first or not last:
        return None
    shares = [10.0 * i for i in range(11)]

    def draw(axes: Axes) -> None:
        axes.set(xlabel="score", ylabel="% of responses below", ylim=(0, 100))
        plot_line(axes, first, shares, "muted", label="start", linestyle=(0, (5, 2)))
        plot_line(axes, last, shares, "c1", label="end")
        add_legend(axes)

    return Chart(
        "distribution", "Distribution of scores", draw,
        columns("score", [("start", first, shares), ("end", last, shares)]),
        caption="Deciles of the batches at the start (dashed) and at the end.",
    )  # fmt: skip


def position_chart(run: RunResult) -> Chart | None:
    """KL by position in the response at the end of the run."""
    curves = [row["kl/per_position"] for row in control.end(run.updates) if row.get("kl/per_position")]
    longest = max(map(len, curves), default=0)
    if not longest:
        return None
    xs = [float(i + 1) for i in range(longest)]
    ys = [fmean([c[i] for c in curves if i < len(c) and c[i] is not None] or [0.0]) for i in range(longest)]
    label = "token of the response"

    def draw(axes: Axes) -> None:
        axes.set(xlabel=label, ylabel="nats")
        plot_line(axes, xs, ys, "c1")

    return Chart(
        "position", "KL by position", draw, columns(label, [("KL", xs, ys)]),
        caption="Mean of the last ten updates: at which positions of a response the policy has changed.",
    )  # fmt: skip


def frontier_chart(run: RunResult) -> Chart | None:
    """Score and gold gain against sqrt(KL), the path of the run, with the peak of gold."""
    points, peak = gold_against_kl(run), gold_peak(run)
    if not points:
        return None
    kls, scores, golds = zip(*points, strict=True)
    places, best = [], None
    for row, (x, score, gold) in zip(run.updates, points, strict=True):
        words = f"sqrt(KL) {format_number(x)}, score {format_number(score)}, gold {format_number(gold)}"
        places.append(Place(x, gold, f"update {row['step']}: {words}"))
        if peak is not None and row["step"] == peak.step:
            best = (x, gold, f"peak of gold, {format_number(peak.gold)}, in update {peak.step}")
    caption = "Gains over the reference along the run, means of five updates."
    if peak is not None and best is not None:
        places.append(Place(*best))
        turned = f"at the end it is {format_number(peak.gold_end)}: the policy exploits the reward model."
        caption += f" Diamond: the {best[2]}; {turned if peak.passed else 'it has not fallen since.'}"

    def draw(axes: Axes) -> None:
        axes.set(xlabel="√KL, nats per response", ylabel="gain")
        plot_line(axes, kls, scores, "c1", label="score")
        plot_line(axes, kls, golds, "c3", label="gold")
        if best is not None:
            plot_points(axes, [best[0]], [best[1]], "alert", marker="D")

    return Chart("frontier", "Score and gold against KL", draw, places, caption)


def _deciles(row: Mapping[str, Any]) -> list[float] | None:
    values = row.get("objective/scores_deciles")
    if not isinstance(values, list) or len(values) != 11 or not all(isinstance(v, int | float) for v in values):
        return None
    return values


def _mean_deciles(rows: Sequence[Mapping[str, Any]]) -> list[float] | None:
    deciles = [values for row in rows if (values := _deciles(row))]
    return [fmean(column) for column in zip(*deciles, strict=True)] if deciles else None
