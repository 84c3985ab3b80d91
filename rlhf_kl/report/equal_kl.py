"""Scores at equal KL: those of a variant less those that a family of variants has at the same KL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, stdev
from typing import Any

from rlhf_kl.report.variant import Variant

INTERVAL_FROM = 5  # seeds: fewer are shown as points only


@dataclass(frozen=True)
class EqualKL:
    """Scores of `points` less those that `curve` has at the same KL, by seed."""

    points: str  # a variant, or a family: then means over its variants
    curve: str  # a family
    measure: str  # scores_shaped | gold
    differences: dict[int, float]
    left_out: int  # pairs whose KL lies outside of the curve: nothing is extrapolated

    @property
    def mean(self) -> float | None:
        return fmean(self.differences.values()) if self.differences else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean difference, from five seeds on."""
        return mean_interval(list(self.differences.values()))

    def to_json(self) -> dict[str, Any]:
        """The entry in compare.json."""
        return {
            "points": self.points,
            "curve": self.curve,
            "measure": self.measure,
            "comparable": bool(self.differences),
            "differences": {str(seed): value for seed, value in self.differences.items()},
            "mean": self.mean,
            "interval": self.interval,
            "left_out": self.left_out,
        }


def compare_families(points: str, variants: Sequence[Variant], curve: Sequence[Variant]) -> list[EqualKL]:
    """Each variant of the family `points`, and the family as a whole, against the curve of another family.

    Empty where that spans no more KL, or is a single point.
    """
    if len(curve) < 2 or _kl_span(variants) >= _kl_span(curve):
        return []
    entries = []
    for measure in ("scores_shaped", "gold"):
        each = [compare_variant(variant, curve, measure) for variant in variants]
        entries += [*each, _mean_entry(points, each)] if len(each) > 1 else [_mean_entry(points, each)]
    return [entry for entry in entries if entry.differences or entry.left_out]


def compare_variant(variant: Variant, curve: Sequence[Variant], measure: str) -> EqualKL:
    """The variant's score less that of the curve at its KL, seed by seed, linear between the curve's points.

    The curve runs over sqrt(KL), against which scores rise almost straight (Gao et al. 2022).
    """
    differences, left_out = {}, 0
    for seed, figures in variant.figures.items():
        points = [
            (math.sqrt(other.kl_sequence), getattr(other, measure))
            for member in curve
            if (other := member.figures.get(seed)) is not None
            and other.kl_sequence is not None
            and getattr(other, measure) is not None
        ]
        score, kl = getattr(figures, measure), figures.kl_sequence
        if score is None or kl is None or len(points) < 2:
            continue
        score_of_curve = interpolate(points, math.sqrt(kl))
        if score_of_curve is None:
            left_out += 1
        else:
            differences[seed] = score - score_of_curve
    return EqualKL(variant.name, curve[0].family, measure, differences, left_out)


def _kl_span(family: Sequence[Variant]) -> float:
    kls = [kl for variant in family if (kl := variant.mean("kl_sequence")) is not None]
    return max(kls) - min(kls) if kls else 0.0


def _mean_entry(name: str, entries: Sequence[EqualKL]) -> EqualKL:
    """Means over the variants of a family, seed by seed, where all of them are comparable."""
    seeds = set.intersection(*(set(entry.differences) for entry in entries))
    differences = {seed: fmean(entry.differences[seed] for entry in entries) for seed in sorted(seeds)}
    return EqualKL(name, entries[0].curve, entries[0].measure, differences, sum(entry.left_out for entry in entries))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x on the straight lines between the points; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean; None of fewer than five values."""
    if len(values) < INTERVAL_FROM:
        return None
    half = student_t(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def student_t(p: float, freedom: int) -> float:
    """Quantile of Student's t by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5); good from 4 on."""
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
