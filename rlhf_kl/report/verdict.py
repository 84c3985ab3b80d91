"""What a comparison says: one table, and sentences that claim no more than its figures show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_kl.report import control
from rlhf_kl.report.compare import Comparison, Variant
from rlhf_kl.report.equal_kl import EqualKL
from rlhf_kl.text import format_number, format_percent

COLUMNS = ("variant", "seeds", "tail error", "in band", "peak", "KL", "score", "gold", "perplexity", "cost")
MEASURES = {"scores_shaped": "score", "gold": "gold score"}
SHOWN = 0.005  # a smaller difference is 0.00 in a sentence


def variant_rows(comparison: Comparison) -> list[list[str]]:
    """One row for each variant: means over seeds, with one standard deviation if there are several."""
    return [
        [
            variant.name,
            str(len(variant.runs)),
            _mean_and_sd(variant, "tail_error"),
            format_percent(variant.mean("time_in_band")),
            f"{format_number(variant.mean('peak'), 2)}x",
            *(_mean_and_sd(variant, name) for name in ("kl", "scores", "gold", "perplexity")),
            _cost(variant.mean("perplexity_cost")),
        ]
        for variant in comparison.variants
    ]


def _mean_and_sd(variant: Variant, name: str) -> str:
    mean, sd = variant.mean(name), variant.sd(name)
    text = format_number(mean, 3 if mean is None or abs(mean) >= 1 else 2)
    decimals = len(text.partition(".")[2]) if "e" not in text else 1
    return text if sd is None else f"{text} ±{sd:.{decimals}f}"


def _cost(value: float | None) -> str:
    return format_percent(value, signed=True)


def text_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = []
    for first, *others in (header, *body):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def judge(comparison: Comparison) -> list[str]:
    """Sentences of four kinds: the target held or missed, scores at equal KL, the best target, the cost."""
    families = comparison.families.items()
    lines = [line for name, members in families for line in _target_lines(name, members)]
    lines += _score_lines(comparison)
    if (best := comparison.best_target) is not None:
        line = f"The gold score is highest at a target of {best.target:g} nats per {comparison.unit} "
        line += f"({format_number(best.gold, 2)})"
        if best.lowest < best.highest:
            line += f"; targets from {best.lowest:g} to {best.highest:g} are within one standard deviation of that"
        lines.append(f"{line}.")
    costs = [f"{name} {cost}" for name, members in families if (cost := _range(members, "perplexity_cost", _cost))]
    return [*lines, f"Cost in held-out perplexity: {'; '.join(costs)}."] if costs else lines


def _target_lines(family: str, members: Sequence[Variant]) -> list[str]:
    """Which variants of a family held the target; where beta ignores the KL, at which KL they ended."""
    targets, unit = {variant.target for variant in members}, members[0].config.kl.unit
    goal = f"the target of {targets.pop():g} nats per {unit}" if len(targets) == 1 else "their targets"
    held, missed, short = ([v for v in members if v.held is verdict] for verdict in (True, False, None))
    lines = []
    if not members[0].is_controlled:
        if judged := ", ".join(map(_description, [*held, *missed])):
            lines.append(f"{family} does not control the KL. Beside {goal}: {judged}.")
    else:
        if held:
            starts = f" from every start ({len(held)} starting betas)" if len(held) == len(members) > 1 else ""
            names = family if len(held) == len(members) else " and ".join(variant.name for variant in held)
            lines.append(f"{names} held {goal}{starts}: {_ranges(held)}.")
        if missed:
            lines.append(f"{family} missed {goal}: {', '.join(map(_description, missed))}.")
    if short:
        names = ", ".join(variant.name for variant in short)
        lines.append(f"Too few updates to judge the KL of {names}: {control.BAND_FROM} are needed.")
    return lines


def _description(variant: Variant) -> str:
    """A variant with its KL over the target and the figures that judge it."""
    kl = variant.mean("kl")
    parts = [] if kl is None else [f"{format_number(kl / variant.target, 2)}x the target"]
    parts.append(_ranges([variant]))
    missed = sum(run.figures["held"] is False for run in variant.runs.values())
    if 0 < missed < len(variant.runs):
        parts.append(f"missed in {missed} of {len(variant.runs)} seeds")
    return f"{variant.name} ({', '.join(parts)})"


def _ranges(variants: Sequence[Variant]) -> str:
    """Tail error, time in band, and how often the ceiling and not only beta limited the KL."""
    error = _range(variants, "tail_error", lambda value: format_number(value, 2))
    text = f"tail error {error}, {_range(variants, 'time_in_band', format_percent)} in band"
    if any(variant.mean("cut") for variant in variants):
        text += f", {_range(variants, 'cut', format_percent)} of the late updates shortened by the ceiling"
    return text


def _range(variants: Sequence[Variant], name: str, form: Callable[[float], str]) -> str:
    """The least and the most of a figure; empty where it is unknown."""
    known = [value for variant in variants if (value := variant.mean(name)) is not None]
    return " to ".join(dict.fromkeys(map(form, (min(known), max(known))))) if known else ""


def _score_lines(comparison: Comparison) -> list[str]:
    entries = [entry for entry in comparison.equal_kl if entry.points in comparison.groups]
    if not entries and len(comparison.variants) > 1:
        return ["The scores are not compared: no two variants can be compared at the same KL."]
    entries.sort(key=lambda entry: list(MEASURES).index(entry.measure))
    return [_score_line(entry, len(comparison.seeds)) for entry in entries]


def _score_line(entry: EqualKL, seeds: int) -> str:
    """How the scores of two groups relate at the same KL. Without an interval no score is called higher."""
    start, other = f"At equal KL the {MEASURES[entry.measure]} of {entry.points}", f"that of {entry.curve}"
    if entry.mean is None:
        return f"{start} is not comparable with {other}: the KLs do not overlap."
    readings = entry.readings.values()
    low, high = entry.interval or (min(r.low for r in readings), max(r.high for r in readings))
    if low <= SHOWN and high >= -SHOWN:
        relation = "cannot be told from"
    elif entry.interval is None:
        relation = "differs from"
    else:
        relation = "is higher than" if low > 0 else "is lower than"
    count = len(readings)
    counted = f"{count} seed{'s' * (count > 1)}" + (f" of {seeds}" if count < seeds else "")
    if entry.interval is not None:
        figures = f"{entry.mean:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, {counted}"
    else:
        bounds = f", between {low:+.2f} and {high:+.2f}" if high - low > SHOWN else ""
        figures = f"{entry.mean:+.2f}{bounds}, {counted}: too few for an interval"
    return f"{start} {relation} {other} ({figures})."
