"""The page of one run."""

from __future__ import annotations

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
from rlhf_kl.report.run import RunFigures, RunResult, figures, number
from rlhf_kl.report.text import percent, shown
from rlhf_kl.run.text import safe_text

DIVERGING = 15  # tokens in the table
DIVERGING_STEPS = 3  # sampled updates that it looks at
LEAST_HOT = 0.5  # nats, the full colour of a token where none diverges more
STRONGEST = 0.7  # opacity of the full colour: the text must stay legible on it


def report_page(run: RunResult, refresh: int | None = None) -> str:
    """The report as one HTML text."""
    found = figures(run)
    steps = sorted({row["step"] for row in run.samples})
    hottest = max([LEAST_HOT, *(number(token, "kl") or 0.0 for row in run.samples for token in _tokens(row))])
    hottest = min(hottest, 4.0)
    return render_page(
        "report.html",
        refresh=refresh,
        name=safe_text(run.name),
        status=run.status if run.status != "unfinished" else f"{len(run.updates)} of {run.config.updates} updates",
        subtitle=_subtitle(run),
        headline=headline(run, found),
        missing=[safe_text(note) for note in run.notes],
        alerts=[_alert(row["step"], text) for row in run.updates for text in row.get("alerts") or ()],
        charts=[chart_values(chart) for chart in run_charts(run)],
        signs=[chart_values(chart) for chart in overoptimisation_charts(run)],
        signs_note=_signs_note(run),
        hottest=shown(hottest, 2),
        before_step=steps[0] if steps else None,
        after_step=steps[-1] if steps else None,
        before=[_sample(row, hottest) for row in run.samples if row["step"] == steps[0]],
        after=[_sample(row, hottest) for row in run.samples if len(steps) > 1 and row["step"] == steps[-1]],
        diverging=diverging_tokens(run.samples),
        diverging_note=f"In the sampled responses of the last {min(DIVERGING_STEPS, len(steps))} sampled updates, "
        "tokens seen at least twice, by the mean KL of the place where they stand.",
        command=_command(run),
        versions=_versions(run),
        config=dump_config(run.config),
    )


def headline(run: RunResult, found: RunFigures) -> list[dict[str, str]]:
    """The figures at the top; those that were not measured are left out."""
    perplexity = run.series("eval/perplexity")[1]
    first = run.updates[0] if run.updates else {}
    cards = [
        (f"KL per {run.unit}", shown(found.kl), f"target {shown(run.target)} nats", found.kl),
        ("Tail error", shown(found.tail_error), "mean |KL/target - 1|, second half", found.tail_error),
        (
            "Time in band",
            percent(found.time_in_band),
            f"within ±{control.BAND:.0%}, from update {control.BAND_FROM}",
            found.time_in_band,
        ),
        ("Peak KL", f"{shown(found.peak)}x", "of the target", found.peak),
        ("Beta", shown(found.beta), f"started at {shown(number(first, 'kl/coef'))}", found.beta),
        ("Score", shown(found.scores), f"started at {shown(number(first, 'objective/scores'))}", found.scores),
        ("Gold", shown(found.gold), f"started at {shown(number(first, 'objective/gold'))}", found.gold),
        (
            "Held-out perplexity",
            shown(found.perplexity),
            f"{percent(found.perplexity_cost, signed=True)} on {shown(perplexity[0])}"
            if found.perplexity_cost is not None
            else "one evaluation only",
            found.perplexity,
        ),
        (
            "Of the best possible gain",
            percent(run.summary.get("tilt_share")),
            "at this KL, by tilting the reference",
            run.summary.get("tilt_share"),
        ),
        (
            "Response length",
            shown(found.length),
            f"tokens; {percent(run.end('rollout/eos_rate'))} end by themselves",
            found.length,
        ),
    ]
    return [{"name": name, "value": value, "note": note} for name, value, note, known in cards if known is not None]


def diverging_tokens(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Tokens of the last sampled updates by their mean KL."""
    steps = sorted({row["step"] for row in samples})[-DIVERGING_STEPS:]
    seen: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row in samples:
        if row["step"] in steps:
            for token in _tokens(row):
                values = tuple(number(token, key) for key in ("kl", "logprob", "ref_logprob"))
                if None not in values:
                    seen[str(token.get("text", ""))].append(values)  # type: ignore[arg-type]
    table = []
    for text, found in seen.items():
        if len(found) > 1:
            kl, logprob, ref = (fmean(column) for column in zip(*found, strict=True))
            table.append((kl, text, len(found), logprob, ref))
    return [
        {
            "text": visible(text),
            "times": str(times),
            "kl": shown(kl),
            "logprob": shown(logprob),
            "ref_logprob": shown(ref),
            "ratio": shown(2.718281828459045 ** min(logprob - ref, 100.0)),
        }
        for kl, text, times, logprob, ref in sorted(table, reverse=True)[:DIVERGING]
        if kl > 0
    ]


def visible(text: str) -> str:
    """A token by itself: blanks at its ends can be seen."""
    shown_text = safe_text(text)
    bare = shown_text.strip(" ")
    if not bare:
        return "␣" * len(shown_text) or "∅"
    left = len(shown_text) - len(shown_text.lstrip(" "))
    right = len(shown_text) - len(shown_text.rstrip(" "))
    return "␣" * left + bare + "␣" * right


def _tokens(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tokens = row.get("tokens")
    return [token for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []


def _sample(row: Mapping[str, Any], hottest: float) -> dict[str, Any]:
    figures_of = [f"{name} {shown(value)}" for name in ("score", "gold") if (value := number(row, name)) is not None]
    if (kl := number(row, "kl")) is not None:
        figures_of.append(f"KL {shown(kl)} nats")
    why = ["picked for its large KL"] if row.get("chosen") == "largest kl" else []  # not a usual one
    return {
        "heading": " · ".join([*figures_of, f"{len(_tokens(row))} tokens", *why]),
        "prompt": safe_text(str(row.get("prompt", "")), keep_newlines=True),
        "response": safe_text(str(row["response"]), keep_newlines=True),
        "tokens": [_token(token, hottest) for token in _tokens(row)],
    }


def _token(token: Mapping[str, Any], hottest: float) -> dict[str, str]:
    text, kl = str(token.get("text", "")), number(token, "kl") or 0.0
    opacity = STRONGEST * min(1.0, max(0.0, kl) / hottest)
    tip = (
        f"{visible(text)}  log π {shown(number(token, 'logprob'))}, log ref {shown(number(token, 'ref_logprob'))}, "
        f"KL {shown(number(token, 'kl'))}"
    )
    return {
        "text": safe_text(text, keep_newlines=True) or "∅",
        "tip": tip,
        "style": f"background:rgba(var(--hot),{opacity:.2f})" if opacity >= 0.02 else "",
    }


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
    if (seconds := number(run.summary, "seconds")) is not None:
        parts.append(f"{seconds / 60:.1f} minutes")
    return safe_text(" · ".join(parts))


def _signs_note(run: RunResult) -> str:
    peak = gold_peak(run)
    if peak is None and run.series("objective/gold")[1]:
        return "Too few updates to tell whether gold turns down."
    if peak is None:
        return (
            "No gold scorer: whether the reward model is being exploited shows only indirectly, in samples that "
            "the reference finds strange, responses that become alike, lengths that drift, a score that follows length."
        )
    if peak.passed:
        return (
            f"Gold was highest in update {peak.step} ({shown(peak.gold)}, at sqrt(KL) {shown(peak.root_kl)}) and has "
            f"fallen to {shown(peak.gold_end)} since."
        )
    return f"Gold has not turned down: {shown(peak.gold_end)} at the end, {shown(peak.gold)} at its best."


def _command(run: RunResult) -> str:
    return f"rlhf-kl train --config {shlex.quote(safe_text(str(run.path / 'config.yaml')))} --output-dir OTHER"


def _versions(run: RunResult) -> str:
    versions = run.summary.get("versions")
    parts = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, Mapping) else []
    if run.summary.get("git"):
        parts.append(f"git {run.summary['git']}")
    return safe_text(" · ".join(parts))
