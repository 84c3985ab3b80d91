"""Signs that a policy exploits its reward model: gold against score, and indirect signs without a gold scorer.

Gao et al. 2022 (2210.10760): against sqrt(KL) the proxy score keeps rising while the gold score rises and then falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from rlhf_kl.report.run import RunResult, Series
from rlhf_kl.run.exploitation import cross_perplexity

SMOOTH = 5  # updates in a smoothed value
CLEAR = 4.0  # standard errors: the highest of many noisy values is always above the last one
PEAK_FALL = 0.1  # of gold's rise to its peak: a smaller fall after it does not count


@dataclass(frozen=True)
class GoldPeak:
    """The highest gold score, and whether gold has fallen since."""

    step: int
    root_kl: float  # sqrt(nats per sequence)
    gold: float
    gold_end: float
    passed: bool


def gold_against_kl(run: RunResult) -> list[tuple[float, float, float]]:
    """(sqrt of sequence KL, score gain, gold gain) of each update, smoothed over five; empty without gold.

    Gains over the reference; scores are those that PPO sees.
    """
    keys = ("kl/sequence", "objective/scores_shaped", "objective/gold")
    score_start, gold_start = (run.reference(key) for key in keys[1:])
    columns = [run.series(key)[1] for key in keys]
    if score_start is None or gold_start is None or any(len(column) < len(run.updates) for column in columns):
        return []
    return [
        (math.sqrt(max(0.0, kl)), score - score_start, gold - gold_start)
        for kl, score, gold in zip(*map(smooth, columns), strict=True)
    ]


def gold_peak(run: RunResult) -> GoldPeak | None:
    """The peak of smoothed gold; None without gold, or with too few updates to judge."""
    points = gold_against_kl(run)
    if len(points) < 2 * SMOOTH:
        return None
    golds = [gold for _, _, gold in points]
    best = max(range(len(golds)), key=golds.__getitem__)
    start = run.reference("objective/gold") or 0.0
    rise = max(golds[best] - golds[0], golds[best] - min(golds))
    return GoldPeak(
        step=run.updates[best]["step"],
        root_kl=points[best][0],
        gold=golds[best] + start,
        gold_end=golds[-1] + start,
        passed=golds[best] - golds[-1] > max(PEAK_FALL * rise, CLEAR * _noise(run)) and best < len(golds) - SMOOTH,
    )


def _noise(run: RunResult) -> float:
    """Standard error of a smoothed gold score, from successive differences: a trend adds little to it."""
    golds = run.series("objective/gold")[1]
    return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(golds)) / 2 / SMOOTH)


def reference_perplexity(run: RunResult) -> Series:
    """Perplexity of the policy's samples under the reference, at the sampling temperature, by update."""
    points = [(float(row["step"]), value) for row in run.updates if (value := cross_perplexity(row)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: list[float]) -> list[float]:
    """Mean of each value and its neighbours, five in all, fewer at the ends."""
    half = SMOOTH // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
