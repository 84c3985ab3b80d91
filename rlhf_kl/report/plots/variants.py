"""One colour, dash and mark for a variant in all charts of a comparison."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.plots.style import DASHES, HUES, MARKERS, ORDERED


class VariantStyle(NamedTuple):
    """How a variant is drawn everywhere."""

    tint: str
    dash: Any
    marker: str


def variant_styles(comparison: Comparison) -> dict[str, VariantStyle]:
    """A hue for every family and a dash for every member; one large family gets an ordered scale instead."""
    families = list(comparison.families.values())
    styles = {}
    if len(families) == 1 and len(families[0]) > len(DASHES):
        ordered = sorted(families[0], key=lambda variant: variant.constant_coef or 0.0)
        for i, variant in enumerate(ordered):
            place = round(i * (len(ORDERED) - 1) / (len(ordered) - 1))
            styles[variant.name] = VariantStyle(ORDERED[place], DASHES[0], MARKERS[i % len(MARKERS)])
        return styles
    for hue, members in zip((HUES * len(families))[: len(families)], families, strict=True):
        for i, variant in enumerate(members):
            styles[variant.name] = VariantStyle(hue, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
    return styles
