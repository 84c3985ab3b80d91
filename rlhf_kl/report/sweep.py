"""Score and cost at several KL targets, of trained runs or of one scaled policy; and which to take, for `scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any, NamedTuple

from rlhf_kl.config.schema.eval import scorer_names
from rlhf_kl.monitors.facts import mean
from rlhf_kl.report.comparison import Comparison
from rlhf_kl.shell import shell_command
from rlhf_kl.text import counted, scorer_label, with_error

# The limits of a recommended target, chosen on eight seeds of the built-in world, where the true score is known.
PERPLEXITY = 2.5  # of held-out texts, over the reference's: more, and the policy has lost what it was trained on
PAIRS = 0.15  # distinct word pairs over the reference's: fewer, and the responses are the same few sentences
APART = 1.1  # times the target before: `scale` may have one policy for two targets that are nearer
GAIN = 0.15  # slope of the score over sqrt(KL), over its steepest: less, and the score is nearly at its top

Figure = tuple[float | None, float | None]  # a mean, and its error or spread
FIGURES = ("kl", "kl_sequence", "scores", "perplexity", "forward_kl_token", "distinct_2")


class SweepPoint(NamedTuple):
    """A policy that was trained or scaled to a target."""

    target: float  # nats in the sweep's unit
    figures: Mapping[str, Figure]  # those of `FIGURES`, and of the scorers; kl in the sweep's unit
    gain: float | None  # of the score that was trained on, over the reference's
    rise_error: float | None = None  # standard error of the gain less that of the point before, where it was measured


@dataclass(frozen=True)
class Sweep:
    """Policies by their KL target, from low to high."""

    unit: str
    points: Sequence[SweepPoint]
    reference: Mapping[str, float | None]  # perplexity and distinct_2 of the reference
    note: str  # for captions: where the figures come from
    scorers: Sequence[str] = ()  # that never train


class Recommendation(NamedTuple):
    """The KL target that a rule without a true score recommends, nats, and why; None = none of the sweep's."""

    target: float | None
    reason: str


def recommend(sweep: Sweep) -> Recommendation:
    """The highest target below the first one that meets a limit.

    It reads what every run has: score, held-out perplexity, distinct word pairs and KL. A score that may still rise,
    by one error of it, meets no limit; nor does one at nearly the target before, where its slope would be noise.
    """
    before, judged, steepest, below, cost = (0.0, 0.0, 0.0), 0.0, 0.0, None, None
    for point in sweep.points:
        values = {name: value for name, (value, _) in point.figures.items()}
        cost, pairs = (_over(values[name], sweep.reference[name]) for name in ("perplexity", "distinct_2"))
        met = []
        if cost is not None and cost > PERPLEXITY:
            met.append(f"the held-out perplexity is {cost:.2f} times the reference's (limit {PERPLEXITY:g})")
        if pairs is not None and pairs < PAIRS:
            met.append(f"distinct word pairs are {pairs:.0%} of the reference's (limit {PAIRS:.0%})")
        kl = values["kl_sequence"]
        if kl is not None and point.gain is not None and point.target > APART * judged:
            root, error = sqrt(max(0.0, kl)), point.figures["scores"][1] or 0.0
            way, rise = root - before[0], point.rise_error
            noise = hypot(error, before[2]) if rise is None else rise
            slope, noise = ((point.gain - before[1]) / way, noise / way) if way > 0 else (0.0, 0.0)
            steepest = max(steepest, slope)
            if slope + noise <= GAIN * steepest or steepest <= 0:
                share = max(0.0, slope) / steepest if steepest > 0 else 0.0
                met.append(f"the score rises {share:.0%} as fast with √KL as at its steepest (limit {GAIN:.0%})")
            before, judged = (root, point.gain, error), point.target
        if met:
            return Recommendation(below, f"at {point.target:g} {', '.join(met)}")
        below = point.target
    paid = "" if cost is None else f" (perplexity is {cost:.2f} times the reference's)"
    reason = f"the highest that was tried; no limit was met{paid}: try higher if its texts are good"
    return Recommendation(below, reason)


def _over(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def sweep_of(comparison: Comparison) -> Sweep | None:
    """The sweep of targets in a comparison, means over seeds; None for fewer than three targets."""
    variants = comparison.by_target
    if not variants:
        return None
    points = [
        SweepPoint(
            v.target,
            {name: (v.mean(name), v.sd(name)) for name in (*FIGURES, *comparison.scorers)},
            v.mean("score_gain"),
        )
        for v in variants
    ]
    runs = [run for v in variants for run in v.runs.values()]
    reference = {name: mean(run.reference(f"eval/{name}") for run in runs) for name in ("perplexity", "distinct_2")}
    return Sweep(comparison.unit, points, reference, f"Ends of the runs. {spread(comparison)}", comparison.scorers)


def spread(comparison: Comparison) -> str:
    """What a mean and its error are, in a caption."""
    return "Means over seeds with one standard deviation." if len(comparison.seeds) > 1 else "One seed."


def sweep_of_scaled(document: Mapping[str, Any]) -> Sweep:
    """The sweep of scale.json."""
    reference, scorers = document["reference"], scorer_names(document["reference"])
    keys = {name: name for name in (*FIGURES, *scorers)} | {"kl": f"kl_{document['unit']}"}

    def point(row: Mapping[str, Any]) -> SweepPoint:
        known = row["scores"] is not None and reference["scores"] is not None
        gain = row["scores"] - reference["scores"] if known else None
        figures = {name: (row[key], row[f"{key}_stderr"]) for name, key in keys.items()}
        return SweepPoint(row["target"], figures, gain, rise_error=row["score_rise_stderr"])

    note = f"{asked_of(document)} at each target, with one standard error over the prompts. Scale 1 was trained."
    points = [point(row) for row in document["rows"]]
    costs = {name: reference[name] for name in ("perplexity", "distinct_2")}
    return Sweep(document["unit"], points, costs, note, scorers)


def asked_of(document: Mapping[str, Any]) -> str:
    """How many responses to how many prompts each row of scale.json has."""
    return f"{document['responses']} responses to {counted(document['prompts'], 'prompt')} of the evaluations"


def scaled_answer(document: Mapping[str, Any], run: str) -> list[str]:
    """What scale.json tells, in a few sentences; `run`: the run's folder as a word of a command line."""
    advice = recommend(sweep_of_scaled(document))
    lines = []
    if document["prompts"] == 1:
        found = "lower than these" if advice.target is None else f"{advice.target:g} nats per {document['unit']}"
        lines.append(f"One prompt suggests no target. What it found: {found}: {advice.reason}.")
    elif advice.target is None:
        lines.append(f"Suggested target: lower than these: {advice.reason}.")
    else:
        target, program = f"{advice.target:g}", shell_command()
        lines.append(f"Suggested target: {target} nats per {document['unit']}: {advice.reason}.")
        lines.append(
            f"Read the texts first. Write this policy: {program} scale {run} --save {target}. Train a run there, which "
            f"may score a little higher: {program} train --config {run}/config.yaml --output-dir OTHER --set "
            f"kl.target={target}"
        )
    if document["reference"]["scores"] is None:
        lines.append("The suggestion knows no scores: --plugins runs the run's reward.")
    if beyond := [f"{row['target']:g}" for row in document["rows"] if row["scale"] > 1]:
        lines.append(f"Only scale 1 was trained. Beyond it (target {', '.join(beyond)}) the curve is extrapolated.")
    if document["too_far"]:
        far = ", ".join(f"{target:g}" for target in document["too_far"])
        lines.append(f"Too far for this run, so not measured: {far}. Train a run with a higher target.")
    return lines


def scale_table(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for the reference and for each target: figures with standard errors."""
    kl = f"kl_{document['unit']}"
    keys = {kl: f"KL/{document['unit']}", "scores": "score"}
    keys |= {name: scorer_label(name) for name in scorer_names(document["reference"])}
    keys |= {"perplexity": "perplexity", "forward_kl_token": "forgetting", "distinct_2": "word pairs"}
    keys["length"] = "tokens"
    rows = [document["reference"] | {kl: 0.0, "target": None, "scale": 0.0}, *document["rows"]]
    keys = {key: name for key, name in keys.items() if rows[-1].get(key) is not None}

    body = []
    for row in rows:
        target = "reference" if row["target"] is None else f"{row['target']:g}"
        figures = [with_error(row.get(key), row.get(f"{key}_stderr")) for key in keys]
        body.append([target, f"{row['scale']:.2f}", *figures])
    return ["target", "scale", *keys.values()], body
