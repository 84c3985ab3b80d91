"""The verdict on a comparison: sentences that claim no more than its figures show."""

from __future__ import annotations

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.equal_kl import EqualKL
from rlhf_kl.report.gold_peak import gold_peak
from rlhf_kl.report.target import target_lines
from rlhf_kl.run.figures import format_percent

FRONTIER = (
    "A KL penalty is not expected to improve gold at a given KL (Gao et al. 2022, 2210.10760): control decides at "
    "which KL a run ends."
)
MEASURES = {"scores_shaped": "score", "gold": "gold score"}
SHOWN = 0.005  # a smaller figure is 0.00 in a sentence


def judge(comparison: Comparison) -> list[str]:
    """Sentences: which variants held the target, how far others missed it, scores at equal KL, the cost."""
    lines = target_lines(comparison)
    entries = [entry for entry in comparison.equal_kl if entry.points in comparison.groups]
    for measure in MEASURES:
        lines += [_equal_kl_line(entry, len(comparison.seeds)) for entry in entries if entry.measure == measure]
    if not entries and len(comparison.variants) > 1:
        lines.append("The scores are not compared: no two variants can be compared at the same KL.")
    if peak := gold_peak(comparison.by_target):
        lines.append(peak.sentence(comparison.unit))
    return [*lines, *_cost_lines(comparison), FRONTIER]


def _equal_kl_line(entry: EqualKL, seeds: int) -> str:
    score = MEASURES[entry.measure]
    if entry.mean is None or entry.bounds is None:
        return (
            f"At equal KL the {score} of {entry.points} is not comparable with that of {entry.curve}: "
            "the KLs do not overlap."
        )
    relation, figures = _relation(entry, entry.mean, entry.bounds)
    values = sorted(entry.differences.values())
    counted = f"{len(values)} seed{'s' * (len(values) > 1)}" + (f" of {seeds}" if len(values) < seeds else "")
    if entry.interval is None:
        among = f"{values[0]:+.2f} to {values[-1]:+.2f} in {counted}" if len(values) > 1 else counted
        counted = f"{among}: too few for an interval"
    return f"At equal KL the {score} of {entry.points} {relation} that of {entry.curve} ({figures}, {counted})."


def _relation(entry: EqualKL, mean: float, bounds: tuple[float, float]) -> tuple[str, str]:
    """The relation between two scores that the figures support, and these figures."""
    low, high = bounds
    open_gap = high - low > SHOWN
    gap = f", {low:+.2f} to {high:+.2f} for the gaps between the ends of {entry.curve}" if open_gap else ""
    if entry.interval is None:
        apart = "cannot be told from" if open_gap and low <= 0 <= high else "differs from"
        return apart, f"by {mean:+.2f}{gap}"
    least, most = entry.interval
    figures = f"difference {mean:+.2f}, 95 % interval {least:+.2f} to {most:+.2f}"
    if least > 0 or most < 0:
        return f"is {'higher' if least > 0 else 'lower'} than", figures
    if high - low > 2 * (entry.spread or 0.0):
        return "cannot be told from", f"{figures}, most of it for the gaps between the ends of {entry.curve}"
    return "is the same within the spread as", figures


def _cost_lines(comparison: Comparison) -> list[str]:
    parts = []
    for name, members in comparison.families.items():
        costs = [cost for variant in members if (cost := variant.mean("perplexity_cost")) is not None]
        if costs:
            low, high = format_percent(min(costs), signed=True), format_percent(max(costs), signed=True)
            parts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return [f"Cost in held-out perplexity: {'; '.join(parts)}."] if parts else []
