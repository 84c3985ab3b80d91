"""The KL target with the highest true score, in a comparison of several targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number


@dataclass(frozen=True)
class GoldPeak:
    """The highest mean gold over seeds, and the targets whose gold is hardly lower."""

    target: float  # nats
    gold: float
    lowest: float  # target whose mean gold is within one standard deviation (its own) of the highest
    highest: float

    def sentence(self, unit: str) -> str:
        """The peak in words, for a verdict."""
        gold = format_number(self.gold, 2)
        text = f"The gold score is highest at a target of {self.target:g} nats per {unit} ({gold})"
        if self.lowest < self.highest:
            text += f"; targets from {self.lowest:g} to {self.highest:g} are within one standard deviation of that"
        return f"{text}."


def gold_peak(variants: Sequence[Variant]) -> GoldPeak | None:
    """The peak over variants that differ in their target; None without gold."""
    golds = [
        (mean, variant.sd("gold") or 0.0, variant.config.kl.target_value)
        for variant in variants
        if (mean := variant.mean("gold")) is not None
    ]
    if not golds:
        return None
    gold, _, target = max(golds)
    near = [other for mean, sd, other in golds if mean + sd >= gold]
    return GoldPeak(target, gold, min(near), max(near))
