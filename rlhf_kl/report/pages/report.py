"""The page of one run."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_kl.config.load import dump_config
from rlhf_kl.report import control
from rlhf_kl.report.overoptimisation import gold_peak
from rlhf_kl.report.pages.render import chart_values, render_page
from rlhf_kl.report.plots.run import overoptimisation_charts, run_charts
from rlhf_kl.report.run import RunResult
from rlhf_kl.run.figures import format_number, format_percent, read_number
from rlhf_kl.run.text import safe_text

DIVERGING = 15  # tokens in the table
DIVERGING_STEPS = 3  # sampled updates that they are taken from
HOTTEST = (0.5, 4.0)  # nats: lower and upper bound of the KL that gets the full colour
STRONGEST = 0.7  # opacity of the full colour: text must stay legible


def report_page(run: RunResult, refresh: int | None = None) -> str:
    """The report as one HTML text."""
    steps = sorted({row["step"] for row in run.samples})
    least, most = HOTTEST
    kls = [read_number(token, "kl") or 0.0 for row in run.samples for token in _tokens(row)]
    hottest = min(most, max([least, *kls]))
    return render_page(
        "report.html",
        refresh=refresh,
        name=safe_text(run.name),
        status=run.status if run.status != "unfinished" else f"{len(run.updates)} of {run.config.updates} updates",
        subtitle=_subtitle(run),
        headline=_headline(run),
        missing=[safe_text(note) for note in run.notes],
        alerts=[_alert(row["step"], text) for row in run.updates for text in row.get("alerts") or ()],
        charts=[chart_values(chart) for chart in run_charts(run)],
        signs=[chart_values(chart) for chart in overoptimisation_charts(run)],
        signs_note=_signs_note(run),
        hottest=format_number(hottest, 2),
        before_step=steps[0] if steps else None,
        after_step=steps[-1] if steps else None,
        before=[_sample(row, hottest) for row in run.samples if row["step"] == steps[0]],
        after=[_sample(row, hottest) for row in run.samples if len(steps) > 1 and row["step"] == steps[-1]],
        diverging=diverging_tokens(run.samples),
        diverging_note=f"In the sampled responses of the last {min(DIVERGING_STEPS, len(steps))} sampled updates, "
        "tokens that occur at least twice, by the mean KL at their position.",
        command=_command(run),
        versions=_versions(run),
        config=dump_config(run.config),
    )


def _headline(run: RunResult) -> list[tuple[str, str, str]]:
    """Name, value and note of the figures at the top, without those that were not measured."""
    figures, tilt_share = run.figures, read_number(run.summary, "tilt_share")
    perplexity, forgotten = (run.series(f"eval/{name}")[1] for name in ("perplexity", "forward_kl_token"))
    first = run.updates[0] if run.updates else {}

    def start(key: str) -> str:
        return f"started at {format_number(read_number(first, key))}"

    cost = "one evaluation only"
    if figures.perplexity_cost is not None:
        cost = f"{format_percent(figures.perplexity_cost, signed=True)} on {format_number(perplexity[0])}"
    ended = format_percent(run.end("rollout/eos_rate"))
    in_band = f"within ±{control.BAND:.0%}, from update {control.BAND_FROM}"
    cards = [
        (f"KL per {run.unit}", figures.kl, "", f"target {format_number(run.target)} nats"),
        ("Tail error", figures.tail_error, "", "mean |KL/target - 1|, second half"),
        ("Time in band", figures.time_in_band, "%", in_band),
        ("Peak KL", figures.peak, "x", "of the target"),
        ("Beta", figures.beta, "", start("kl/coef")),
        ("Score", figures.scores, "", start("objective/scores")),
        ("Gold", figures.gold, "", start("objective/gold")),
        ("Held-out perplexity", figures.perplexity, "", cost),
        ("Forgetting", forgotten[-1] if forgotten else None, "", "nats per token: KL of the reference to the policy"),
        ("Score gain", tilt_share, "%", "of the largest possible at this KL: samples of the reference, reweighted"),
        ("Response length", figures.length, "", f"tokens; {ended} end by themselves"),
    ]
    return [
        (name, format_percent(value) if unit == "%" else f"{format_number(value)}{unit}", note)
        for name, value, unit, note in cards
        if value is not None
    ]


# ---- samples


def diverging_tokens(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Tokens of the last sampled updates by their mean KL: text, count, means of KL and log-probs, ratio."""
    steps = sorted({row["step"] for row in samples})[-DIVERGING_STEPS:]
    places: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for token in (token for row in samples if row["step"] in steps for token in _tokens(row)):
        kl, logprob, ref = (read_number(token, key) for key in ("kl", "logprob", "ref_logprob"))
        if kl is not None and logprob is not None and ref is not None:
            places[str(token.get("text", ""))].append((kl, logprob, ref))
    means = []
    for text, values in places.items():
        if len(values) > 1:
            kl, logprob, ref = (fmean(column) for column in zip(*values, strict=True))
            means.append((kl, text, len(values), logprob, ref))
    means.sort(reverse=True)
    return [
        [
            visible_blanks(text), str(times), format_number(kl), format_number(logprob), format_number(ref),
            format_number(math.exp(min(logprob - ref, 100.0))),
        ]
        for kl, text, times, logprob, ref in means[:DIVERGING]
        if kl > 0
    ]  # fmt: skip


def visible_blanks(text: str) -> str:
    """A token with visible marks for the blanks at its ends."""
    printed = safe_text(text)
    middle = printed.strip(" ")
    if not middle:
        return "␣" * len(printed) or "∅"
    left, right = (len(printed) - len(rest) for rest in (printed.lstrip(" "), printed.rstrip(" ")))
    return "␣" * left + middle + "␣" * right


def _tokens(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tokens = row.get("tokens")
    return [token for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []


def _sample(row: Mapping[str, Any], hottest: float) -> dict[str, Any]:
    tokens = _tokens(row)
    heading = [
        f"{name} {format_number(value)}" for name in ("score", "gold") if (value := read_number(row, name)) is not None
    ]
    if (kl := read_number(row, "kl")) is not None:
        heading.append(f"KL {format_number(kl)} nats")
    heading.append(f"{len(tokens)} tokens")
    if isinstance(columns := row.get("columns"), Mapping):
        heading += [safe_text(f"{name}: {value}") for name, value in columns.items()]
    if row.get("chosen") == "largest kl":  # not a typical one
        heading.append("selected for its large KL")
    return {
        "heading": " · ".join(heading),
        "prompt": safe_text(str(row.get("prompt", "")), keep_newlines=True),
        "response": safe_text(str(row["response"]), keep_newlines=True),
        "tokens": [_token(token, hottest) for token in tokens],
    }


def _token(token: Mapping[str, Any], hottest: float) -> dict[str, str]:
    text, kl = str(token.get("text", "")), read_number(token, "kl")
    logprob, ref = (format_number(read_number(token, key)) for key in ("logprob", "ref_logprob"))
    opacity = STRONGEST * min(1.0, max(0.0, kl or 0.0) / hottest)
    return {
        "text": safe_text(text, keep_newlines=True) or "∅",
        "tip": f"{visible_blanks(text)}  log π {logprob}, log ref {ref}, KL {format_number(kl)}",
        "style": f"background:rgba(var(--hot),{opacity:.2f})" if opacity >= 0.02 else "",
    }


# ---- words around the figures


def _alert(step: int, text: str) -> dict[str, Any]:
    kind, colon, rest = safe_text(text).partition(":")
    return {"step": step, "kind": kind, "text": colon + rest}


def _subtitle(run: RunResult) -> str:
    config = run.config
    parts = [
        f"seed {run.seed}",
        f"{config.kl.controller.kind} controller",
        f"policy {config.policy.model}",
        f"{len(run.updates)} updates of {config.rollout.batch_size} responses",
    ]
    if (seconds := read_number(run.summary, "seconds")) is not None:
        parts.append(f"{seconds / 60:.1f} minutes")
    return safe_text(" · ".join(parts))


def _signs_note(run: RunResult) -> str:
    peak = gold_peak(run)
    if peak is None and run.series("objective/gold")[1]:
        return "Too few updates to judge whether gold falls."
    if peak is None:
        return (
            "No gold scorer: only indirect signs show whether the policy exploits the reward model: samples that are "
            "unlikely under the reference, responses that become alike, changing lengths, a score that follows length."
        )
    best, last = format_number(peak.gold), format_number(peak.gold_end)
    if not peak.passed:
        return f"Gold has not fallen: {last} at the end, {best} at its best."
    place = f"update {peak.step} ({best}, at sqrt(KL) {format_number(peak.root_kl)})"
    return f"Gold was highest in {place} and has fallen to {last} since."


def _command(run: RunResult) -> str:
    return f"rlhf-kl train --config {shlex.quote(safe_text(str(run.path / 'config.yaml')))} --output-dir OTHER"


def _versions(run: RunResult) -> str:
    versions = run.summary.get("versions")
    parts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, Mapping) else []
    if run.summary.get("git"):
        parts.append(f"git {run.summary['git']}")
    return safe_text(" · ".join(parts))
