"""A comparison judged in sentences that claim no more than its figures carry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.control import BAND
from rlhf_kl.report.equal_kl import EqualKL
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number, format_percent, read_number

FRONTIER = (
    "A KL penalty is not expected to move the frontier of gold against KL (Gao et al. 2022, 2210.10760): control "
    "decides where on it a run ends."
)


def judge(comparison: Comparison) -> list[str]:
    """Sentences: who held the target, by how much others missed it, scores at equal KL, the cost."""
    lines = [_target_line(name, members) for name, members in comparison.families.items()]
    lines += _ratio_lines(comparison)
    for measure in ("scores_shaped", "gold"):
        lines += [
            _equal_kl_line(entry, len(comparison.seeds))
            for entry in comparison.equal_kl
            if entry.points in comparison.families and entry.measure == measure
        ]
    lines.append(_cost_line(comparison))
    return [line for line in lines if line] + [FRONTIER]


def held_target(variant: Variant) -> bool | None:
    """Whether every seed's KL was within 25 % of the target on average over its second half."""
    errors = variant.values("tail_error")
    return None if len(errors) < len(variant.runs) else all(error <= BAND for error in errors)


def _target_line(family: str, members: Sequence[Variant]) -> str:
    """Which variants of a family held the target."""
    kept = [variant for variant in members if held_target(variant)]
    missed = [variant for variant in members if held_target(variant) is False]
    targets = {variant.config.kl.target_value for variant in members}
    goal = f"target of {targets.pop():g} nats per {members[0].config.kl.unit}" if len(targets) == 1 else "targets"
    if missed:
        names = " and ".join(variant.name for variant in kept)
        text = f"held the {goal} only at {names}, and missed it" if kept else f"missed the {goal}"
        return f"{family} {text}: {', '.join(_miss(variant) for variant in missed)}."
    if not kept:
        return ""
    starts = f" from every start ({len(kept)} starting betas)" if len(kept) > 1 else ""
    return f"{family} held the {goal}{starts}: tail error {_range(v.mean('tail_error') for v in kept)}."


def _miss(variant: Variant) -> str:
    kl, target = variant.mean("kl"), variant.config.kl.target_value
    ratio = f" ran at {format_number(kl / target, 2)}x the target," if kl is not None else ""
    return f"{variant.name}{ratio} tail error {format_number(variant.mean('tail_error'), 2)}"


def _ratio_lines(comparison: Comparison) -> list[str]:
    """Tail errors of families that missed over those of a family that always held, start by start."""
    steady = {name: members for name, members in comparison.families.items() if all(map(held_target, members))}
    lines = []
    for name, members in comparison.families.items():
        missed = [variant for variant in members if held_target(variant) is False]
        for other, keepers in steady.items():
            ratios = [
                error / least
                for variant in missed
                if (error := variant.mean("tail_error")) is not None
                and (least := _counterpart(variant, keepers).mean("tail_error"))
            ]
            if name != other and ratios:
                lines.append(f"Where {name} missed, its tail error is {_range(ratios)} times that of {other}.")
    return lines


def _counterpart(variant: Variant, members: Sequence[Variant]) -> Variant:
    """The member that started from the same beta, else the one with the largest tail error."""
    same = [member for member in members if _starting_beta(member) == _starting_beta(variant)]
    return same[0] if same else max(members, key=lambda member: member.mean("tail_error") or 0.0)


def _starting_beta(variant: Variant) -> float | None:
    """That of the first seed."""
    updates = next(iter(variant.runs.values())).updates
    return read_number(updates[0], "kl/coef") if updates else None


def _equal_kl_line(entry: EqualKL, seeds: int) -> str:
    score = "score" if entry.measure == "scores_shaped" else "gold score"
    pair = f"the {score} of {entry.points} {{}} that of {entry.curve}"
    if entry.mean is None:
        return f"At equal KL {pair.format('is not comparable with')}: the KLs do not overlap."
    values = sorted(entry.differences.values())
    counted = f"{len(values)} seed{'s' * (len(values) > 1)}" + (f" of {seeds}" if len(values) < seeds else "")
    if entry.interval is None:
        among = f"{values[0]:+.2f} to {values[-1]:+.2f} in {counted}" if len(values) > 1 else counted
        return f"At equal KL {pair.format(f'differs by {entry.mean:+.2f} from')} ({among}: too few for an interval)."
    low, high = entry.interval
    relation = "the same within the spread as" if low <= 0 <= high else "higher than" if low > 0 else "lower than"
    return (
        f"At equal KL {pair.format(f'is {relation}')} "
        f"(difference {entry.mean:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, {counted})."
    )


def _cost_line(comparison: Comparison) -> str:
    parts = []
    for name, members in comparison.families.items():
        costs = [cost for variant in members if (cost := variant.mean("perplexity_cost")) is not None]
        if costs:
            low, high = format_percent(min(costs), signed=True), format_percent(max(costs), signed=True)
            parts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return f"Cost in held-out perplexity: {'; '.join(parts)}." if parts else ""


def _range(values: Iterable[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "unknown"
    low, high = format_number(known[0], 2), format_number(known[-1], 2)
    return low if low == high else f"{low} to {high}"
