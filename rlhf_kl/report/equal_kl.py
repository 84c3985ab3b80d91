"""Scores at equal KL: the score of a variant minus that of a family of variants, at the same KL and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.interpolate import PchipInterpolator
from scipy.special import stdtrit

INTERVAL_FROM = 5  # seeds
SAME_ROOT_KL = 0.05  # ends whose sqrt(KL) differ by at most 5 % (their KL by 10 %) have the same KL

Point = tuple[float, float]  # the end of a run: sqrt(KL in nats per response), score gained over the reference
Ends = Mapping[int, Point]  # by seed


class Group(NamedTuple):
    """A family of variants, or one variant."""

    name: str
    variants: Mapping[str, Ends]


class Reading(NamedTuple):
    """A gain or a difference of gains, with its lower and upper bound."""

    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class EqualKL:
    """Scores of `points` minus those of `curve` at the same KL, by seed."""

    points: str  # a variant, or a family: then means over its variants
    curve: str  # a family
    measure: str  # scores_shaped | gold
    readings: Mapping[int, Reading]
    left_out: int  # pairs outside the curve's range of KL
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
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean difference, from five seeds on: the bounds, widened by the spread over seeds."""
        spread = interval_half(list(self.differences.values()))
        return None if self.bounds is None or spread is None else (self.bounds[0] - spread, self.bounds[1] + spread)

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


def compare_groups(first: Group, second: Group, measure: str) -> list[EqualKL]:
    """Each variant of the group that spans less KL, and that group as one, against the curve of the other group.

    Two single variants are compared only if they ended at the same KL.
    """
    points, curve = sorted((second, first), key=_kl_span)
    entries = [_compare_variant(name, ends, curve, measure) for name, ends in points.variants.items()]
    mean = _mean_entry(points.name, entries)
    entries = [*entries, mean] if len(entries) > 1 else [mean]
    return [entry for entry in entries if entry.readings or (entry.left_out and not entry.direct)]


def _compare_variant(name: str, ends: Ends, curve: Group, measure: str) -> EqualKL:
    """The variant's gain minus that of the curve at its KL, for each seed."""
    readings, left_out = {}, 0
    for seed, (root_kl, gain) in ends.items():
        others = [other[seed] for other in curve.variants.values() if seed in other]
        if not others:
            continue
        if (reading := ScoreCurve(others).at(root_kl)) is None:
            left_out += 1
        else:
            readings[seed] = Reading(gain - reading.gain, gain - reading.high, gain - reading.low)
    return EqualKL(name, curve.name, measure, readings, left_out, len(curve.variants) == 1)


def _mean_entry(name: str, entries: Sequence[EqualKL]) -> EqualKL:
    """Means over the variants of a family, for each seed in which all are comparable."""
    first, seeds = entries[0], set.intersection(*(set(entry.readings) for entry in entries))
    readings = {
        seed: Reading(*map(fmean, zip(*(entry.readings[seed] for entry in entries), strict=True)))
        for seed in sorted(seeds)
    }
    left_out = sum(entry.left_out for entry in entries)
    return EqualKL(name, first.curve, first.measure, readings, left_out, first.direct)


def _kl_span(group: Group) -> float:
    """The largest mean KL of a variant minus the smallest."""
    kls = [fmean(root_kl**2 for root_kl, _ in ends.values()) for ends in group.variants.values() if ends]
    return max(kls) - min(kls) if kls else 0.0


def interval_half(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % interval of the mean; None for fewer than five values."""
    if len(values) < INTERVAL_FROM:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))


class ScoreCurve:
    """Gain over sqrt(KL) through the reference, (0, 0), and the ends of runs. Nothing is extrapolated.

    Between its points the curve is the monotone cubic of Fritsch and Butland (1984), PCHIP: its extremes are points.
    The bounds assume a curve that is concave (or convex) around a gap: it lies between the straight line across the
    gap and the extended lines of the neighbouring gaps. Scores saturate, and gold rises and falls once (Gao et al.
    2022, 2210.10760), so both are concave.
    """

    def __init__(self, ends: Sequence[Point]) -> None:
        """ends: of runs, in any order; ends at the same KL are replaced by their mean."""
        self.points = [(0.0, 0.0), *_merged(ends)]
        self._curve = PchipInterpolator(*zip(*self.points, strict=True)) if len(self.points) > 1 else None

    @property
    def last(self) -> float:
        """The largest sqrt(KL) that a run ended at."""
        return self.points[-1][0]

    def at(self, root_kl: float) -> Reading | None:
        """The gain at a sqrt(KL); None outside the range of the runs.

        A single run, and the last of several, give the gain at their own KL only.
        """
        if len(self.points) == 2 or root_kl > self.last:
            return self._at_last(root_kl)
        if self._curve is None:
            return None
        gap = max(i for i, (x, _) in enumerate(self.points[:-1]) if x <= root_kl)
        low, high = self._bounds(gap, root_kl)
        gain = min(high, max(low, float(self._curve(root_kl))))
        return Reading(gain, low, high)

    def _at_last(self, root_kl: float) -> Reading | None:
        """The gain of the last run; the bounds are the difference in KL times the slope of the last gap."""
        (x, y), distance = self.points[-1], abs(root_kl - self.last)
        if distance > SAME_ROOT_KL * max(root_kl, x):
            return None
        off = abs(self._slope(len(self.points) - 2)) * distance
        return Reading(y, y - off, y + off)

    def _slope(self, gap: int) -> float:
        (x0, y0), (x1, y1) = self.points[gap : gap + 2]
        return (y1 - y0) / (x1 - x0)

    def _bounds(self, gap: int, x: float) -> Point:
        """Lower and upper bound of the gain inside a gap."""
        (x0, y0), (x1, y1) = self.points[gap : gap + 2]
        chord = y0 + self._slope(gap) * (x - x0)
        extended = [y0 + self._slope(gap - 1) * (x - x0)] if gap > 0 else []
        if gap < len(self.points) - 2:
            extended.append(y1 + self._slope(gap + 1) * (x - x1))
        low = max((y for y in extended if y < chord), default=chord)
        high = min((y for y in extended if y > chord), default=chord)
        return low, high


def _merged(ends: Sequence[Point]) -> list[Point]:
    """Ends by sqrt(KL); ends at the same KL become their mean."""
    groups: list[list[Point]] = []
    for x, y in sorted(end for end in ends if end[0] > 0):
        if groups and x - groups[-1][0][0] <= SAME_ROOT_KL * x:
            groups[-1].append((x, y))
        else:
            groups.append([(x, y)])
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
