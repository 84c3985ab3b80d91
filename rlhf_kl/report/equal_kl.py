"""Scores at equal KL: the score of a variant minus that of a family of variants at the same KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from rlhf_kl.report.run import RunFigures
from rlhf_kl.report.score_curve import Point, Reading, ScoreCurve
from rlhf_kl.report.variant import Variant

INTERVAL_FROM = 5  # seeds: fewer are shown as points only
GAINS = {"scores_shaped": "score_gain", "gold": "gold_gain"}  # measure -> its gain over the reference


@dataclass(frozen=True)
class EqualKL:
    """Scores of `points` minus those of `curve` at the same KL, by seed."""

    points: str  # a variant, or a family: then means over its variants
    curve: str  # a family
    measure: str  # scores_shaped | gold
    readings: Mapping[int, Reading]  # the difference, with its lower and upper bound
    left_out: int  # pairs outside the curve's range of KL: nothing is extrapolated
    direct: bool  # runs that ended at the same KL: there is no curve between them

    @property
    def differences(self) -> dict[int, float]:
        """By seed."""
        return {seed: reading.gain for seed, reading in self.readings.items()}

    @property
    def mean(self) -> float | None:
        return fmean(self.differences.values()) if self.readings else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lower and upper bound of the mean difference, by the gaps of the curve."""
        readings = self.readings.values()
        return (fmean(r.low for r in readings), fmean(r.high for r in readings)) if readings else None

    @property
    def spread(self) -> float | None:
        """Half of the 95 % interval from the spread over seeds alone, from five seeds on."""
        return interval_half(list(self.differences.values()))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean difference, from five seeds on: the bounds, widened by the spread over seeds."""
        if self.bounds is None or self.spread is None:
            return None
        return self.bounds[0] - self.spread, self.bounds[1] + self.spread

    def to_json(self) -> dict[str, Any]:
        """The entry in compare.json."""
        return {
            "points": self.points,
            "curve": self.curve,
            "measure": self.measure,
            "comparable": bool(self.readings),
            "direct": self.direct,
            "differences": {str(seed): value for seed, value in self.differences.items()},
            "mean": self.mean,
            "bounds": self.bounds,
            "interval": self.interval,
            "left_out": self.left_out,
        }


def compare_groups(first: Sequence[Variant], second: Sequence[Variant], names: tuple[str, str]) -> list[EqualKL]:
    """Each variant of the group that spans less KL, and that whole group, against the curve of the other group.

    Two single variants are compared only if they ended at the same KL.
    """
    groups = [(names[1], second), (names[0], first)]
    (points, variants), (curve, members) = sorted(groups, key=lambda group: _kl_span(group[1]))
    entries = []
    for measure in GAINS:
        each = [compare_variant(variant, members, curve, measure) for variant in variants]
        entries += [*each, _mean_entry(points, each)] if len(each) > 1 else [_mean_entry(points, each)]
    return [entry for entry in entries if entry.readings or (entry.left_out and not entry.direct)]


def compare_variant(variant: Variant, members: Sequence[Variant], curve: str, measure: str) -> EqualKL:
    """The variant's gain minus that of the members' curve at its KL, for each seed."""
    readings, left_out = {}, 0
    for seed, figures in variant.figures.items():
        end = run_end(figures, measure)
        score_curve = curve_of(members, seed, measure)
        if end is None or score_curve is None:
            continue
        if (reading := score_curve.at(end[0])) is None:
            left_out += 1
        else:
            readings[seed] = Reading(end[1] - reading.gain, end[1] - reading.high, end[1] - reading.low)
    return EqualKL(variant.name, curve, measure, readings, left_out, len(members) == 1)


def curve_of(members: Sequence[Variant], seed: int, measure: str) -> ScoreCurve | None:
    """The curve through the ends of one seed's runs; None without runs."""
    figures = [member.figures[seed] for member in members if seed in member.figures]
    ends = [end for one in figures if (end := run_end(one, measure)) is not None]
    return ScoreCurve(ends) if ends else None


def run_end(figures: RunFigures, measure: str) -> Point | None:
    """sqrt(KL) and gain at the end of a run."""
    gain, kl = getattr(figures, GAINS[measure]), figures.kl_sequence
    return None if gain is None or kl is None else (math.sqrt(max(0.0, kl)), gain)


def _kl_span(group: Sequence[Variant]) -> float:
    kls = [kl for variant in group if (kl := variant.mean("kl_sequence")) is not None]
    return max(kls) - min(kls) if kls else 0.0


def _mean_entry(name: str, entries: Sequence[EqualKL]) -> EqualKL:
    """Means over the variants of a family, for each seed in which all are comparable."""
    first, seeds = entries[0], set.intersection(*(set(entry.readings) for entry in entries))
    readings = {
        seed: Reading(*map(fmean, zip(*(entry.readings[seed] for entry in entries), strict=True)))
        for seed in sorted(seeds)
    }
    left_out = sum(entry.left_out for entry in entries)
    return EqualKL(name, first.curve, first.measure, readings, left_out, first.direct)


def interval_half(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % interval of the mean; None for fewer than five values."""
    if len(values) < INTERVAL_FROM:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
