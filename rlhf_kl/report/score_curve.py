"""The score at a KL, interpolated between the ends of runs, with bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scipy.interpolate import PchipInterpolator

SAME_ROOT_KL = 0.05  # ends whose sqrt(KL) differ by at most 5 % (their KL by 10 %) have the same KL

Point = tuple[float, float]  # sqrt(KL in nats per sequence), score gained over the reference


class Reading(NamedTuple):
    """A gain, with its lower and upper bound."""

    gain: float
    low: float
    high: float


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
        carried_on = [y0 + self._slope(gap - 1) * (x - x0)] if gap > 0 else []
        if gap < len(self.points) - 2:
            carried_on.append(y1 + self._slope(gap + 1) * (x - x1))
        low = max((y for y in carried_on if y < chord), default=chord)
        high = min((y for y in carried_on if y > chord), default=chord)
        return low, high


def _merged(ends: Sequence[Point]) -> list[Point]:
    """Ends by sqrt(KL); ends at the same KL become their mean."""
    groups: list[list[Point]] = []
    for x, y in sorted(end for end in ends if end[0] > 0):
        if groups and x - groups[-1][0][0] <= SAME_ROOT_KL * x:
            groups[-1].append((x, y))
        else:
            groups.append([(x, y)])
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
