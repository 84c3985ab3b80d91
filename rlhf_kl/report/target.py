"""Sentences on the KL target: which variants held it, which were near it by chance, how far others missed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlhf_kl.report import control
from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number, format_percent, read_number

HELD = (
    f"At the target: tail error (mean |KL/target - 1| of the second half) at most {control.HELD_ERROR:g}, and at least "
    f"{control.HELD_SHARE:.0%} of the updates from {control.BAND_FROM} on in band, within {control.BAND:.0%} of the "
    "target, in every seed. Held: at the target, with a beta that depends on the KL."
)


def target_lines(comparison: Comparison) -> list[str]:
    """Which families held the target, the definition, the ceiling's part, and ratios of tail errors."""
    families = comparison.families.items()
    lines = [line for name, members in families if (line := _family_line(name, members))]
    lines += [HELD] if lines else []
    if unknown := [variant.name for variant in comparison.variants if variant.held is None]:
        lines.append(f"Too few updates to judge the KL of {', '.join(unknown)}: {control.BAND_FROM} are needed.")
    return [*lines, *_ceiling_lines(comparison), *_ratio_lines(comparison)]


def _family_line(family: str, members: Sequence[Variant]) -> str:
    """Which variants of a family held the target; for a beta that ignores the KL, which were at it."""
    kept = [variant for variant in members if variant.held]
    missed = [variant for variant in members if variant.held is False]
    if not kept and not missed:
        return ""
    targets = {variant.config.kl.target_value for variant in members}
    goal = f"target of {targets.pop():g} nats per {members[0].config.kl.unit}" if len(targets) == 1 else "targets"
    places = ", ".join(map(_place, missed))
    if not members[0].is_controlled:
        parts = [f"at the {goal} with {', '.join(map(_place, kept))}"] if kept else []
        parts += [f"away from {'it' if kept else f'the {goal}'} with {places}"] if missed else []
        return (
            f"{family} does not control the KL, as its beta does not depend on it; its KL was {', and '.join(parts)}."
        )
    if missed and kept:
        names = " and ".join(variant.name for variant in kept)
        return f"{family} held the {goal} only at {names}, and missed it: {places}."
    if missed:
        return f"{family} missed the {goal}: {places}."
    starts = f" from every start ({len(kept)} starting betas)" if len(kept) > 1 else ""
    error, share = _range(kept, "tail_error", _two_digits), _range(kept, "time_in_band", format_percent)
    return f"{family} held the {goal}{starts}: tail error {error}, {share} of the updates in band."


def _place(variant: Variant) -> str:
    """A variant, with its KL over the target."""
    kl = variant.mean("kl")
    ratio = f"{_two_digits(kl / variant.config.kl.target_value)}x the target, " if kl is not None else ""
    error, share = _two_digits(variant.mean("tail_error")), format_percent(variant.mean("time_in_band"))
    missed = sum(figures.held is False for figures in variant.figures.values())
    some = f", missed in {missed} of {len(variant.runs)} seeds" if 0 < missed < len(variant.runs) else ""
    return f"{variant.name} ({ratio}tail error {error}, {share} in band{some})"


def _ceiling_lines(comparison: Comparison) -> list[str]:
    """Variants in which the ceiling, and not only beta, limited the KL."""
    cuts = [(variant.name, cut) for variant in comparison.variants if (cut := variant.mean("cut"))]
    shares = ", ".join(f"{name} {format_percent(cut)}" for name, cut in cuts)
    return [f"Updates of the second half that the ceiling shortened: {shares}."] if cuts else []


def _ratio_lines(comparison: Comparison) -> list[str]:
    """Ratios of tail errors: families that missed over one that held the same target with the same ceiling."""
    families = comparison.families
    lines = []
    for other, keepers in families.items():
        if not all(variant.held and variant.is_controlled for variant in keepers):
            continue
        for name, members in families.items():
            missed = [variant for variant in members if variant.held is False]
            if len({variant.config.kl.target_value for variant in (*missed, *keepers)}) > 1:
                continue
            if len({variant.ceiling for variant in (*missed, *keepers)}) > 1:
                lines.append(f"The tail errors of {name} and {other} are not compared: their ceilings differ.")
            elif ratios := [ratio for variant in missed if (ratio := _error_ratio(variant, keepers)) is not None]:
                low, high = _two_digits(min(ratios)), _two_digits(max(ratios))
                shown = low if low == high else f"{low} to {high}"
                lines.append(f"Away from the target, the tail error of {name} is {shown} times that of {other}.")
    return lines


def _error_ratio(variant: Variant, keepers: Sequence[Variant]) -> float | None:
    """The ratio to the keeper with the same starting beta, else to the keeper with the largest error."""
    same = [keeper for keeper in keepers if _starting_beta(keeper) == _starting_beta(variant)]
    keeper = same[0] if same else max(keepers, key=lambda keeper: keeper.mean("tail_error") or 0.0)
    error, least = variant.mean("tail_error"), keeper.mean("tail_error")
    return error / least if error is not None and least else None


def _starting_beta(variant: Variant) -> float | None:
    """That of the first seed."""
    updates = next(iter(variant.runs.values())).updates
    return read_number(updates[0], "kl/coef") if updates else None


def _range(variants: Iterable[Variant], name: str, form: Callable[[float], str]) -> str:
    """The least and the most of a figure."""
    known = sorted(value for variant in variants if (value := variant.mean(name)) is not None)
    low, high = form(known[0]), form(known[-1])
    return low if low == high else f"{low} to {high}"


def _two_digits(value: float | None) -> str:
    return format_number(value, 2)
