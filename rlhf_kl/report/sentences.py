"""What a comparison says: a few sentences, of which the first is the answer, and a table of its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlhf_kl.control.verdict import BAND_FROM, why_short
from rlhf_kl.report.comparison import SCORES, Comparison, Variant
from rlhf_kl.report.equal_kl import EqualKL
from rlhf_kl.shell import shell_command
from rlhf_kl.text import format_number, format_percent, scorer_label

WORDS = {"held": "held", "late": "reached late", "missed": "missed", "short": "too short to say"}
BY = {"held": "held by", "late": "reached late by", "missed": "missed by", "short": "too early to say of"}
WIDTH = 80  # columns of a terminal
SHOWN = 0.005  # a smaller difference is 0.00 in a sentence


# ---- tables


def figures_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for each variant: means over seeds, with one standard deviation of several."""
    scorers = [name for name in comparison.scorers if any(v.mean(name) is not None for v in comparison.variants)]
    names = ["kl", "scores", *scorers, "perplexity"]
    titles = {"kl": f"KL/{comparison.unit}", "scores": "score"}
    header = ["variant", "target", *(titles.get(name, scorer_label(name)) for name in names)]
    rows = [[v.name, outcome(v), *(_mean_and_sd(v, name) for name in names)] for v in comparison.variants]
    return header, rows


def outcome(variant: Variant) -> str:
    """What became of a variant's target: its verdict, how many seeds have it, or where a constant beta ended."""
    if counts := variant.verdicts:
        (word, count), *others = counts.most_common()
        return f"{WORDS[word]} {count}/{len(variant.runs)}" if others else WORDS[word]
    return "no target" if variant.over_target is None else f"{format_number(variant.over_target, 2)}x the target"


def _mean_and_sd(variant: Variant, name: str) -> str:
    mean, sd = variant.mean(name), variant.sd(name)
    text = format_number(mean, 3 if mean is None or abs(mean) >= 1 or name == "kl" else 2)
    decimals = len(text.partition(".")[2]) if "e" not in text else 1
    return text if sd is None else f"{text} ±{sd:.{decimals}f}"


# ---- sentences


def fallen_text(names: Sequence[str], where: str = "") -> str:
    """That these scorers, which never train, fell while the score rose; empty without any. `where`: of what."""
    labels = [scorer_label(name) for name in names]
    several = " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))
    rose = f"In {where} the score rose" if where else "The score rose"
    return f"{rose}, and {several}, which never trained, fell: read the texts." if names else ""


def judge(comparison: Comparison) -> list[str]:
    """A few sentences: targets held or missed, scores at equal KL, the cost. Which target to take, `scale` tells."""
    lines = _control_line(comparison)
    for variant in comparison.variants:
        names = dict.fromkeys(name for run in variant.runs.values() for name in run.fallen)
        lines += [fallen_text(list(names), variant.name)] * bool(names)
    if len(comparison.seeds) > 1:
        lines += _score_lines(comparison)
    lines += _alert_line(comparison)
    costs = {
        name: [cost for variant in members if (cost := variant.mean("perplexity_cost")) is not None]
        for name, members in comparison.families.items()
    }
    if any(costs.values()):
        signed = partial(format_percent, signed=True)
        each = [f"{name} {_span(values, signed)}" for name, values in costs.items() if values]
        lines.append(f"Cost in held-out perplexity: {'; '.join(each)}.")
    if len(comparison.seeds) == 1 and len(comparison.variants) > 1:
        lines.append("1 seed: no difference can be judged. Two show a spread, five give an interval.")
    if comparison.by_target:
        lines.append(f"Which target? The table tells what each cost; {shell_command()} scale RUN suggests one.")
    return lines


def _control_line(comparison: Comparison) -> list[str]:
    """A line on all variants: who held the target, reached it late or missed it; where a constant beta ended."""
    parts = []
    for word, label in BY.items():
        names, runs = [], []
        for variant in comparison.variants:
            if count := variant.verdicts[word]:
                seeds = len(variant.runs)
                names.append(variant.name if count == seeds else f"{variant.name} ({count} of {seeds} seeds)")
                runs += [run.figures for run in variant.runs.values() if run.figures["verdict"] == word]
        if word == "short":
            figures = " or ".join(dict.fromkeys(map(why_short, runs)))
        else:
            error = "error_since" if word == "late" else "tail_error"
            figures = f"off by {_span([run[error] for run in runs], format_percent)} on average" + " since" * (
                word == "late"
            )
        if names:
            parts.append(f"{label} {', '.join(names)} ({figures})")
    for family, members in comparison.families.items():
        ratios = [ratio for v in members if not v.verdicts and (ratio := v.over_target) is not None]
        if members[0].constant_coef == 0:
            parts.append(f"{family} has no penalty and ended at {format_number(members[0].mean('kl'))} nats")
        elif ratios:
            shortest = min(len(run.updates) for v in members for run in v.runs.values())
            after = f" after only {shortest} updates" * (shortest < BAND_FROM)
            span = _span(ratios, lambda x: f"{format_number(x, 2)}x")
            parts.append(f"{family} ended with a KL of {span} its target{after}")
    target = "targets" if comparison.target is None else f"target of {comparison.target:g} nats"
    return [f"KL {target} per {comparison.unit}: {'; '.join(parts)}."] if parts else []


def _alert_line(comparison: Comparison) -> list[str]:
    """Which alerts each variant's runs had; no line without any."""
    parts = []
    for variant in comparison.variants:
        texts = [text for run in variant.runs.values() for row in run.updates for text in row.get("alerts") or ()]
        if names := dict.fromkeys(text.partition(":")[0] for text in texts):
            parts.append(f"{variant.name} ({', '.join(names)})")
    return [f"Alerts: {'; '.join(parts)}."] if parts else []


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The least and the most of some values; empty without any."""
    return " to ".join(dict.fromkeys(map(form, (min(values), max(values))))) if values else ""


def _score_lines(comparison: Comparison) -> list[str]:
    """For the score and each scorer that never trains one sentence about all pairs of groups at the same KL."""
    lines = []
    for measure in (SCORES, *comparison.scorers):
        label = "score" if measure == SCORES else scorer_label(measure)
        entries = [entry for entry in comparison.equal_kl if entry.measure == measure]
        readings = [_reading(entry) for entry in entries]
        if len(entries) > 2:  # only what can be told
            readings = [reading for reading in readings if "no difference" not in reading]
            readings += ["no other difference" if readings else "no difference between any two"]
        if entries:
            several = entries[0].together
            note = f" (intervals for all {several} pairs together)" if several > 1 else ""
            label = label[0].upper() + label[1:]
            lines.append(f"{label} at equal KL: {'; '.join(dict.fromkeys(readings))}{note}.")
    return lines


def _reading(entry: EqualKL) -> str:
    """How the scores of two groups relate at the same KL. Without an interval no score is called higher."""
    points, curve = entry.points, entry.curve
    if entry.mean is None:
        return f"{points} and {curve} have no KL in common"
    if entry.interval is None:
        few = f"{len(entry.readings)} seed{'s' * (len(entry.readings) > 1)}: too few for an interval"
        return f"{points} {entry.mean:+.2f} beside {curve} ({few})"
    low, high = entry.interval
    text = f"{entry.mean:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
    if low <= SHOWN and high >= -SHOWN:
        return f"no difference between {points} and {curve} ({text})"
    return f"{points} is {'higher' if low > 0 else 'lower'} than {curve} ({text})"
