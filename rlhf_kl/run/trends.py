"""Statistics of the alerts: does a noisy series rise or fall?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, median_low


def noise(values: Sequence[float], smoothing: int) -> float:
    """Standard error of a mean of `smoothing` values, from successive differences: a trend adds little to it."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / 2 / smoothing)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change over the window along the least-squares line, and the t statistic of its slope."""
    size = len(values)
    if size < 3:
        return 0.0, 0.0
    middle, mean = (size - 1) / 2, fmean(values)
    spread = sum((x - middle) ** 2 for x in range(size))
    slope = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    residual = sum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(values))
    error = math.sqrt(residual / (size - 2) / spread)
    noiseless = 1e-9 * (abs(mean) + abs(slope))  # figures without noise must not give an infinite t
    return slope * (size - 1), slope / max(error, noiseless, 1e-12)


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Medians of each third, the last one low, so that a spike of one or two updates does not count as a rise."""
    size = len(values) // 3
    return median(values[:size]), median(values[size : 2 * size]), median_low(values[2 * size :])


def rises(values: Sequence[float], floor: float, least: int, growth: float = 1.3) -> bool:
    """Each third of a full window above the one before; the last over `growth` x the first and `floor`."""
    if len(values) < least:
        return False
    first, second, third = thirds(values)
    return first < second < min(third, values[-1]) and third > growth * first and third > floor
