"""Which variants of a stored comparison differ at the same setting: a sentence for the guide.

    python scripts/differences.py advantages

Variants are named KIND-SETTING. Student's t test of each pair's differences by seed, for the score and the true score,
two-sided. Of many tests some are significant by chance: Holm's correction (1979, "A simple sequentially rejective
multiple test procedure") makes 5 % the chance of one false difference among all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scipy.stats import ttest_rel

RESULTS = Path(__file__).resolve().parent / "results"
MEASURES = {"scores": "score", "gold": "true score"}
LEVEL = 0.05


class Difference(NamedTuple):
    """Of two variants at one setting, means over the seeds."""

    more: str
    less: str
    setting: str
    measure: str
    size: float
    p: float  # of all tests together


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that hold for all tests together, in the same order."""
    order, least, adjusted = sorted(range(len(p_values)), key=lambda i: p_values[i]), 0.0, [0.0] * len(p_values)
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def differences(figures: Mapping[str, Any]) -> list[Difference]:
    """Of all pairs at the same setting in both measures, the surest first. `figures`: of a result."""
    found, p_values = [], []
    for one, other in combinations(figures, 2):
        (a, _, setting), (b, _, same) = one.rpartition("-"), other.rpartition("-")
        for measure in MEASURES if setting == same else ():
            x, y = (figures[name][measure]["seeds"] for name in (one, other))
            size = fmean(x) - fmean(y)
            found.append(((a, b) if size > 0 else (b, a), setting, measure, abs(size)))
            p_values.append(float(ttest_rel(x, y).pvalue))
    every = [Difference(*pair, *rest, p) for (pair, *rest), p in zip(found, holm(p_values), strict=True)]
    return sorted(every, key=lambda each: each.p)


def sentence(every: Sequence[Difference]) -> str:
    """How many are significant, and which."""
    sure = [
        f"the {MEASURES[each.measure]} of `{each.more}` is {each.size:.2f} above that of `{each.less}` "
        f"at {each.setting}"
        for each in every
        if each.p < LEVEL
    ]
    count = {0: "none is", 1: "one is"}.get(len(sure), f"{len(sure)} are")
    tail = f": {'; '.join(sure)}" if sure else ""
    return f"Of {len(every)} differences {count} significant (5 % for all together, Holm; paired by seed){tail}."


def main() -> None:
    """The sentence on a result, and every test."""
    found = json.loads((RESULTS / f"{sys.argv[1]}.json").read_text(encoding="utf-8"))
    every = differences(found["figures"])
    for each in every:
        print(f"{each.more} > {each.less} at {each.setting}, {each.measure}: {each.size:.3f}, p {each.p:.3f}")
    print(sentence(every))


if __name__ == "__main__":
    main()
