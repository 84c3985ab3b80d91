"""Best of n: the score gain of a KL without training, from scores of reference samples only.

Of n reference samples for a prompt, keep the one with the highest score. Its KL to the reference is at most
log n - (n - 1)/n (Stiennon et al. 2020, 2009.01325, G.3; an upper bound: Beirami et al. 2024, 2401.01879).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple


class BestOfN(NamedTuple):
    n: int
    kl_bound: float  # nats per sequence
    gain: float  # mean score of the best minus the mean score of all
    gold_gain: float | None


def kl_bound(n: int) -> float:
    """Upper bound of KL(best of n || reference), nats per sequence."""
    return math.log(n) - (n - 1) / n


def best_of_n(
    scores: Sequence[float], groups: Sequence[Hashable], golds: Sequence[float] | None = None
) -> list[BestOfN]:
    """The curve for n = 1, 2, 4, ..., if half of the groups have n samples (a group = the responses to a prompt).

    golds: scores of the same responses from another scorer. The mean is over all subsets of n, not over one draw.
    """
    members: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for score, group, gold in zip(scores, groups, golds or scores, strict=True):
        members[group].append((score, gold))
    if not members:
        return []
    curve, n = [], 1
    while 2 * len(large := [group for group in members.values() if len(group) >= n]) >= len(members):
        means = _mean([_expected_best(group, 1) for group in large])
        score, gold = _mean([_expected_best(group, n) for group in large])
        curve.append(BestOfN(n, kl_bound(n), score - means[0], None if golds is None else gold - means[1]))
        n *= 2
    return curve


def _expected_best(group: Sequence[tuple[float, float]], n: int) -> tuple[float, float]:
    """Mean score and gold of the best of n over all subsets of the group; ties are broken evenly."""
    total, score, gold, seen = math.comb(len(group), n), 0.0, 0.0, 0
    for value, tied in groupby(sorted(group), key=lambda pair: pair[0]):
        golds = [pair[1] for pair in tied]
        # Subsets whose largest score is `value`: subsets of all scores up to it, minus subsets of all below it.
        weight = (math.comb(seen + len(golds), n) - math.comb(seen, n)) / total
        score += weight * value
        gold += weight * math.fsum(golds) / len(golds)
        seen += len(golds)
    return score, gold


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.fsum(p[0] for p in pairs) / len(pairs), math.fsum(p[1] for p in pairs) / len(pairs)
