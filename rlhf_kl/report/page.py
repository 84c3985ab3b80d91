"""Self-contained HTML pages of a run and of a comparison: one file, nothing fetched, all text of runs is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf_kl.config.resolve import dump_config, flat
from rlhf_kl.control import adjusts
from rlhf_kl.control.verdict import BAND, BAND_FROM, verdict_text
from rlhf_kl.monitors.facts import closing_note, score_error
from rlhf_kl.monitors.kl_shares import kl_shares
from rlhf_kl.plugins import GIVEN
from rlhf_kl.report import token_tables
from rlhf_kl.report.charts import run_charts
from rlhf_kl.report.drawing import Chart, css, save_sheet, svg
from rlhf_kl.report.one_run import RunResult, read_run
from rlhf_kl.report.sentences import fallen_text
from rlhf_kl.report.texts import text_figures
from rlhf_kl.run.folder import RunFolder, write_atomic
from rlhf_kl.shell import program_version, source_name
from rlhf_kl.text import (
    counted,
    duration,
    format_number,
    format_percent,
    read_number,
    safe_text,
    scorer_label,
    start_to_end,
    visible,
)

HOTTEST = 2.0  # nats of a token that gets the full colour
STRONGEST = 0.7  # opacity of the full colour: text must stay legible
BADGES = {"held": "good", "late": "late", "missed": "bad"}  # verdict -> class of the badge


def write_report(path: Path, refresh: int | None = None) -> RunResult:
    """Read the run at `path` and write its report.html and report.png. Errors: InputError."""
    run = read_run(path)
    write_atomic(run.report, report_page(run, refresh if run.status == "unfinished" else None))
    if charts := run_charts(run):
        save_sheet(charts, RunFolder(path).picture, columns=2, heading=run.name)
    return run


def report_page(run: RunResult, refresh: int | None = None) -> str:
    """The report of one run. `refresh`: seconds after which a browser reads it again."""
    verdict = run.figures["verdict"]
    return render(
        "report.html",
        refresh=refresh,
        name=run.name,
        fallen=fallen_text(run.fallen),
        badge=(BADGES.get(verdict, ""), verdict_text(run.figures)) if run.status == "finished" else ("", run.status),
        subtitle=_subtitle(run),
        cards=_cards(run),
        closing_note=closing_note(len(run.updates)),
        notes=run.notes,
        alerts=[(row["step"], *text.partition(":")) for row in run.updates for text in row.get("alerts") or ()],
        charts=[render_chart(chart) for chart in run_charts(run)],
        shares={"": kl_shares(run.token_parts)},
        tables=token_tables,
        hottest=f"{HOTTEST:g}",
        texts=[(each["prompt"], _texts(run, each)) for each in run.texts],
        trained_on=any(each["trained_on"] for each in run.texts),
        command=_command(run),
        versions=" · ".join(f"{name} {value}" for name, value in (run.summary.get("versions") or {}).items()),
        config=dump_config(run.config),
    )


def _command(run: RunResult) -> str:
    """What repeats a run; what was given in Python no command has."""
    config, values = str(run.path / "config.yaml"), flat(run.config.model_dump())
    names = {"data.prompts": "prompts", "eval.texts": "texts", "reward.kind": "reward"}
    if given := [f"{name}=..., " for key, name in names.items() if str(values[key]).startswith(GIVEN)]:
        return f'rlhf_kl.train("{config}", {"".join(given)}output_dir="OTHER")'
    return f"rlhf-kl train --config {shlex.quote(config)} --output-dir OTHER"


def render(template: str, **values: Any) -> str:
    """A template's page. Text of a run is escaped, and control characters in it are shown as text."""

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else safe_text(str(value), keep_newlines=True)

    pages = Environment(loader=PackageLoader("rlhf_kl.report"), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True, finalize=finalize)  # fmt: skip
    return pages.get_template(template).render(colours=Markup(css()), version=program_version(), **values)


def render_chart(chart: Chart) -> dict[str, Any]:
    """For the template."""
    return {"title": chart.title, "svg": Markup(svg(chart)), "caption": chart.caption or chart.subtitle}


# ---- the figures of a run


def _cards(run: RunResult) -> list[tuple[str, str, str, str]]:
    """Colour, name, value and note of each figure that was measured; those that are asked first have a colour."""
    figures, closing = run.figures, {name: start_to_end(pair) for name, pair in run.closing.items()}
    kl, target, cost = figures["kl"], figures["target"], figures["perplexity_cost"]
    aimed = kl is not None and adjusts(run.config.kl.controller.kind)
    error = score_error(run.updates)
    share = "-" if figures["verdict"] == "short" else format_percent(read_number(run.summary, "tilt_share"))
    cards = [
        ("kl", "KL", format_number(kl) + f" of {target:g}" * aimed,
         f"nats per {run.unit}" + ", without a target" * (not aimed)),
        ("score", "Score", closing.get("scores", "-"), "" if error is None else f"±{format_number(error)} at the end"),
        *(_scorer_card(run, name) for name in run.scorers if name in closing),
        ("perplexity", "Held-out perplexity", closing.get("perplexity", "-"),
         f"{format_percent(cost, signed=True)} on the reference" if cost is not None else ""),
        ("", "Tail error", format_number(figures["tail_error"]), "mean |KL/target - 1|, second half"),
        ("", "Time in band", format_percent(figures["time_in_band"]),
         f"within ±{BAND:.0%}, from update {BAND_FROM}"),
        ("", "Highest KL", format_number(None if figures["peak"] is None else figures["peak"] * target),
         f"nats per {run.unit}" + f", {format_number(figures['peak'])} times the target" * aimed),
        ("", "Beta", closing.get("beta", "-"), f"{run.config.kl.controller.kind} controller"),
        ("", "Forgetting", closing.get("forward_kl_token", "-"), "nats per token: KL of the reference to the policy"),
        ("", "Score gain", share, "of the largest possible at this KL"),
        ("", "Response length", closing.get("length", "-"),
         f"tokens; {format_percent(run.end('rollout/eos_rate'))} end by themselves"),
    ]  # fmt: skip
    return [card for card in cards if card[2] != "-"]


def _scorer_card(run: RunResult, name: str) -> tuple[str, str, str, str]:
    """The card of a scorer that never trains."""
    label, error = scorer_label(name), read_number(run.evaluations[-1], f"eval/{name}_stderr")
    note = "in the evaluations" + ("" if error is None else f", ±{format_number(error)} at the end")
    return "gold", label[0].upper() + label[1:], start_to_end(run.closing[name]), note


def _subtitle(run: RunResult) -> str:
    config = run.config
    policy = source_name(config.policy.model)
    parts = [f"seed {run.seed}", f"{config.kl.controller.kind} controller", f"policy {policy}",
             f"{counted(len(run.updates), 'update')} of {config.rollout.batch_size} responses"]  # fmt: skip
    if (seconds := read_number(run.summary, "seconds")) is not None:
        parts.append(duration(seconds))
    return " · ".join(parts)


# ---- texts


def response_figures(text: Mapping[str, Any]) -> str:
    """Scores and KL in words."""
    return " · ".join(text_figures(text, "KL {} nats per response"))


def _texts(run: RunResult, texts: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Heading, figures and tokens of the answers to a held-out prompt: before, on the way, after."""
    policy = texts["policy"]
    chosen = {id(text): text for text in (policy[0], policy[len(policy) // 2], policy[-1])}
    names = {1: "Before (the start)", len(run.updates) + 1: "After"}
    return [
        (names.get(text["step"], f"Update {text['step']}"), response_figures(text), list(map(_token, text["tokens"])))
        for text in chosen.values()
    ]


def _token(token: Mapping[str, Any]) -> dict[str, str]:
    """A token with its colour and the text for the pointer."""
    logprob, ref, kl = (read_number(token, key) for key in ("logprob", "ref_logprob", "kl"))
    shown = visible(token["text"])
    opacity = STRONGEST * min(1.0, max(0.0, kl or 0.0) / HOTTEST)
    return {
        "text": token["text"] or "∅",
        "tip": f"{shown}  log π {format_number(logprob)}, log ref {format_number(ref)}, KL {format_number(kl)}",
        "style": f"background:rgba(var(--hot),{opacity:.2f})" if opacity >= 0.02 else "",
    }
