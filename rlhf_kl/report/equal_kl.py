"""Scores at equal KL: the score of a family of variants minus that of another one, at the same KL and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.interpolate import PchipInterpolator
from scipy.special import stdtrit

INTERVAL_FROM = 5  # seeds
SAME_ROOT_KL = 0.05  # ends whose sqrt(KL) differ by at most 5 % (their KL by 10 %) have the same KL

Point = tuple[float, float]  # the end of a run: sqrt(KL in nats per response), score gained over the reference
Group = Mapping[str, Mapping[int, Point]]  # of one variant or several: the ends of its runs, by seed


class Reading(NamedTuple):
    """A gain or a difference of gains, with its lower and upper bound."""

    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class EqualKL:
    """Scores of `points` minus those of `curve` at the same KL, by seed."""

    points: str  # a family, or a variant where there is one family: means over its variants
    curve: str  # another one
    measure: str  # scores_shaped, or a scorer that never trains
    readings: Mapping[int, Reading]
    left_out: int  # pairs outside the curve's range of KL
    together: int = 1  # pairs of groups whose intervals hold together

    @property
    def mean(self) -> float | None:
        return fmean(reading.gain for reading in self.readings.values()) if self.readings else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lower and upper bound of the mean difference, by the gaps of the curve."""
        readings = self.readings.values()
        return (fmean(r.low for r in readings), fmean(r.high for r in readings)) if readings else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean difference, from five seeds on: the bounds, widened by the spread over seeds."""
        spread = interval_half([reading.gain for reading in self.readings.values()], self.together)
        return None if self.bounds is None or spread is None else (self.bounds[0] - spread, self.bounds[1] + spread)

    def to_json(self) -> dict[str, Any]:
        """The entry in compare.json; each reading is a difference with its bounds."""
        return asdict(self) | {"mean": self.mean, "bounds": self.bounds, "interval": self.interval}


def compare_groups(groups: Sequence[tuple[str, Group]], measure: str) -> EqualKL | None:
    """Of two named groups the mean over the variants of the one that spans less KL, against the other's curve.

    Two single variants are compared only if they ended at the same KL; None if there is nothing to compare.
    """
    first, second = groups
    ordered = (second, first) if _kl_span(second[1]) <= _kl_span(first[1]) else (first, second)
    (name, points), (curve, others) = ordered
    variants, left_out = list[dict[int, Reading]](), 0
    for ends in points.values():
        readings = {}
        for seed, (root_kl, gain) in ends.items():
            if found := [other[seed] for other in others.values() if seed in other]:
                if (reading := ScoreCurve(found).at(root_kl)) is None:
                    left_out += 1
                else:
                    readings[seed] = Reading(gain - reading.gain, gain - reading.high, gain - reading.low)
        variants.append(readings)
    # Seeds in which all variants are comparable.
    rows = {
        seed: zip(*(each[seed] for each in variants), strict=True)
        for seed in sorted(set.intersection(*map(set, variants)))
    }
    means = {seed: Reading(*map(fmean, row)) for seed, row in rows.items()}
    known = means or (left_out and len(others) > 1)  # a single run outside of the other's KL is no news
    return EqualKL(name, curve, measure, means, left_out) if known else None


def _kl_span(group: Group) -> float:
    """The largest mean KL of a variant minus the smallest."""
    kls = [fmean(root_kl**2 for root_kl, _ in ends.values()) for ends in group.values() if ends]
    return max(kls) - min(kls) if kls else 0.0


def interval_half(values: Sequence[float], together: int = 1) -> float | None:
    """Half of Student's 95 % interval of the mean; None for fewer than five values.

    With so many `together` all of them cover their means in 95 % of cases (Bonferroni).
    """
    if len(values) < INTERVAL_FROM:
        return None
    return float(stdtrit(len(values) - 1, 1 - 0.025 / together)) * stdev(values) / math.sqrt(len(values))


class ScoreCurve:
    """Gain over sqrt(KL) through the reference, (0, 0), and the ends of runs. Nothing is extrapolated.

    Between its points the curve is the monotone cubic of Fritsch and Butland (1984), PCHIP: its extremes are points.
    The bounds assume a curve that is concave (or convex) around a gap: it lies between the straight line across the
    gap and the extended lines of the neighbouring gaps. Scores saturate, and gold rises and falls once (Gao et al.
    2022, 2210.10760), so both are concave.
    """

    def __init__(self, ends: Sequence[Point]) -> None:
        """ends: of runs, in any order; ends at the same KL are replaced by their mean."""
        groups: list[list[Point]] = [[(0.0, 0.0)]]
        for x, y in sorted(end for end in ends if end[0] > 0):
            if x - groups[-1][0][0] <= SAME_ROOT_KL * x:
                groups[-1].append((x, y))
            else:
                groups.append([(x, y)])
        self.points = [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]
        self._curve = PchipInterpolator(*zip(*self.points, strict=True)) if len(self.points) > 1 else None

    def at(self, root_kl: float) -> Reading | None:
        """The gain at a sqrt(KL); None outside the range of the runs.

        A single run, and the last of several, give the gain at their own KL only.
        """
        if self._curve is None:
            return None
        last, gain = self.points[-1]
        if len(self.points) == 2 or root_kl > last:
            distance = abs(root_kl - last)
            if distance > SAME_ROOT_KL * max(root_kl, last):
                return None
            off = abs(self._line(len(self.points) - 2, last + distance) - gain)
            return Reading(gain, gain - off, gain + off)
        gap = max(i for i, (x, _) in enumerate(self.points[:-1]) if x <= root_kl)
        chord = self._line(gap, root_kl)
        extended = [self._line(i, root_kl) for i in (gap - 1, gap + 1) if 0 <= i < len(self.points) - 1]
        low = max((y for y in extended if y < chord), default=chord)
        high = min((y for y in extended if y > chord), default=chord)
        return Reading(min(high, max(low, float(self._curve(root_kl)))), low, high)

    def _line(self, gap: int, x: float) -> float:
        """The straight line across a gap, carried on to any x."""
        (x0, y0), (x1, y1) = self.points[gap : gap + 2]
        return y0 + (y1 - y0) / (x1 - x0) * (x - x0)
