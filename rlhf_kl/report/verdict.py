"""A comparison in sentences that say what its figures carry and no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf_kl.report.compare import Comparison, EqualKL, Variant
from rlhf_kl.report.control import BAND
from rlhf_kl.report.run import number
from rlhf_kl.report.text import percent, shown

FRONTIER = (
    "A KL penalty is not expected to move the frontier of gold against KL (Gao et al. 2022, 2210.10760): control "
    "decides where on it a run ends."
)


def verdict(comparison: Comparison) -> list[str]:
    """Sentences: who held the target, by how much others missed it, scores at equal KL, the cost."""
    lines = [held_line(name, members) for name, members in comparison.families.items()]
    lines += _ratio_lines(comparison)
    whole = [entry for entry in comparison.equal_kl if entry.points in comparison.families]
    lines += [equal_line(entry, len(comparison.seeds)) for entry in whole if entry.measure == "scores_shaped"]
    lines += [equal_line(entry, len(comparison.seeds)) for entry in whole if entry.measure == "gold"]
    lines += _cost_line(comparison)
    return [line for line in lines if line] + [FRONTIER]


def held(variant: Variant) -> bool | None:
    """Whether every seed's KL was within 25 % of the target on average over its second half."""
    errors = variant.values("tail_error")
    return None if len(errors) < len(variant.runs) else all(error <= BAND for error in errors)


def held_line(family: str, members: Sequence[Variant]) -> str:
    """Which variants of a family held the target."""
    judged = [(variant, held(variant)) for variant in members]
    kept = [variant for variant, ok in judged if ok]
    missed = [variant for variant, ok in judged if ok is False]
    targets = {variant.config.kl.target_value for variant in members}
    goal = f"target of {targets.pop():g} nats per {members[0].config.kl.unit}" if len(targets) == 1 else "targets"
    if kept and not missed:
        where = f" from every start ({len(kept)} starting betas)" if len(kept) > 1 else ""
        return f"{family} held the {goal}{where}: tail error {_range(v.mean('tail_error') for v in kept)}."
    if not missed:
        return ""
    text = f"{family} " + (f"held the {goal} only at {_named(kept)}, and missed it" if kept else f"missed the {goal}")
    return f"{text}: {', '.join(_miss(variant) for variant in missed)}."


def _miss(variant: Variant) -> str:
    kl, target = variant.mean("kl"), variant.config.kl.target_value
    at = f" ran at {shown(kl / target, 2)}x the target," if kl is not None else ""
    return f"{variant.name}{at} tail error {shown(variant.mean('tail_error'), 2)}"


def _ratio_lines(comparison: Comparison) -> list[str]:
    """Tail errors of families that missed over those of a family that always held, start by start."""
    steady = {name: members for name, members in comparison.families.items() if all(held(v) for v in members)}
    lines = []
    for name, members in comparison.families.items():
        missed = [variant for variant in members if held(variant) is False]
        for other, keepers in steady.items():
            ratios = [
                (mine / theirs, variant.name)
                for variant in missed
                if (mine := variant.mean("tail_error")) is not None
                and (theirs := _counterpart(variant, keepers).mean("tail_error"))
            ]
            if name != other and ratios:
                among = _range(ratio for ratio, _ in ratios)
                lines.append(f"Where {name} missed, its tail error is {among} times that of {other}.")
    return lines


def _counterpart(variant: Variant, members: Sequence[Variant]) -> Variant:
    """The member that started from the same beta, else the one with the largest tail error."""
    same = [member for member in members if start_of(member) == start_of(variant)]
    return same[0] if same else max(members, key=lambda member: member.mean("tail_error") or 0.0)


def start_of(variant: Variant) -> float | None:
    """The starting beta of the first seed."""
    updates = next(iter(variant.runs.values())).updates
    return number(updates[0], "kl/coef") if updates else None


def equal_line(entry: EqualKL, seeds: int) -> str:
    """One comparison at equal KL."""
    what = "score" if entry.measure == "scores_shaped" else "gold score"
    pair = f"the {what} of {entry.points} {{}} that of {entry.curve}"
    if not entry.comparable or entry.mean is None:
        return f"At equal KL {pair.format('is not comparable with')}: the KLs do not overlap."
    found = sorted(entry.differences.values())
    counted = f"{len(found)} seed{'s'[: len(found) > 1]}" + ("" if len(found) == seeds else f" of {seeds}")
    if entry.interval is None:
        among = f"{found[0]:+.2f} to {found[-1]:+.2f} in {counted}" if len(found) > 1 else counted
        return f"At equal KL {pair.format(f'differs by {entry.mean:+.2f} from')} ({among}: too few for an interval)."
    low, high = entry.interval
    how = "the same within the spread as" if low <= 0 <= high else "higher than" if low > 0 else "lower than"
    return (
        f"At equal KL {pair.format(f'is {how}')} "
        f"(difference {entry.mean:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, {counted})."
    )


def _cost_line(comparison: Comparison) -> list[str]:
    parts = []
    for name, members in comparison.families.items():
        costs = [cost for variant in members if (cost := variant.mean("perplexity_cost")) is not None]
        if costs:
            low, high = percent(min(costs), signed=True), percent(max(costs), signed=True)
            parts.append(f"{name} {low}" + ("" if low == high else f" to {high}"))
    return [f"Cost in held-out perplexity: {'; '.join(parts)}."] if parts else []


def _range(values: Iterable[float | None]) -> str:
    found = sorted(value for value in values if value is not None)
    if not found:
        return "unknown"
    low, high = shown(found[0], 2), shown(found[-1], 2)
    return low if low == high else f"{low} to {high}"


def _named(variants: Sequence[Variant]) -> str:
    return " and ".join(variant.name for variant in variants)
