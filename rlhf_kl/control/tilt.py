"""What a KL budget can buy, from scores of reference samples only: the best policy, and best of n.

The optimum of E[score] - beta * KL(pi || ref) is the tilt pi* = ref * exp(score / beta) / Z (Korbak et al.
2022, 2205.11275; Rafailov et al. 2023, appendix A.1). With n samples of the reference and weights
w = softmax(score / beta): KL(beta) = sum w log(n w), score gain(beta) = sum w score - mean score. For
Gaussian scores of spread sigma this is KL = sigma^2 / (2 beta^2), gain = sigma * sqrt(2 KL); real scores
saturate. KL is per *sequence*, in nats.

A policy can move probability between the responses to a prompt, and not between prompts. Continuous scores are centred
on their prompt's mean and tilted as one sample. Scores with few values (right or wrong) are tilted prompt by prompt:
there KL(0) is the mean over prompts of log(samples / samples with the top score).

Best of n keeps, of n reference samples for a prompt, the one with the highest score. Its KL to the reference is at most
log n - (n - 1)/n (Stiennon et al. 2020, 2009.01325, G.3; an upper bound: Beirami et al. 2024, 2401.01879).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from operator import mul
from statistics import fmean
from typing import NamedTuple

MIN_ESS = 30.0  # below this, a few samples have most of the weight, and both figures are too low
REACHED = 0.99  # share of the KL at beta 0 that is asked for at most: the last percent takes beta to 0
NEAR_NORMAL = 0.1  # part by which the tilt's gain may differ from that of Gaussian scores
FEW = 0.25  # chance that two responses to a prompt have the same score: as with four equally likely values


class Tilt(NamedTuple):
    kl: float  # nats per sequence, KL(tilt || reference)
    gain: float  # mean score of the tilt minus mean score of the reference
    ess: float  # effective sample size, 1 / sum w^2


class Solution(NamedTuple):
    coef: float
    tilt: Tilt  # at `measured`
    measured: float  # the coef, or the smallest reliable one if `coef` is extrapolated
    limit: float  # KL of the tilt as coef goes to 0

    @property
    def extrapolated(self) -> bool:
        return self.coef < self.measured


def centre_groups(scores: Sequence[float], groups: Sequence[Hashable], *, scale: bool = False) -> list[float]:
    """Scores minus the mean of their group (a group = the responses to one prompt).

    A policy can only use the differences within a prompt. The rest of a group of m is scaled by
    sqrt(m / (m - 1)), which keeps the within-group variance right when m is small. Groups of one have
    no spread and are left out, unless there are no others: then the common mean is subtracted.
    scale: divide them by their group's standard deviation, if it has one.
    """
    usable = [values for values in _members(scores, groups) if len(values) > 1]
    if not usable:
        usable = [[float(score) for score in scores]]
    centred = []
    for values in usable:
        mean = math.fsum(values) / len(values)
        rest = [value - mean for value in values]
        size = math.sqrt(math.fsum(x * x for x in rest) / len(rest)) if scale else 1.0
        factor = 1.0 if scale else math.sqrt(len(values) / max(1, len(values) - 1))
        centred += [x * factor / size if size > 0.0 else 0.0 for x in rest]
    return centred


def has_few_values(scores: Sequence[float], groups: Sequence[Hashable]) -> bool:
    """Whether responses to a prompt often have equal scores, and the best score of a prompt is also that of others.

    A penalty that most responses pay, beside a continuous score of the rest, makes equal scores but no common best one.
    """
    members = [values for values in _members(scores, groups) if len(values) > 1]
    pairs = sum(math.comb(len(values), 2) for values in members)
    equal = sum(math.comb(count, 2) for values in members for count in Counter(values).values())
    best = [max(values) for values in members if max(values) > min(values)]
    return bool(members) and equal >= FEW * pairs and (len(best) < 2 or 2 * len(set(best)) <= len(best))


def kl_limit(scores: Sequence[float], groups: Sequence[Hashable] | None = None) -> float:
    """KL of the tilt as coef goes to 0, nats per sequence: the mean over prompts of log(samples / top samples)."""
    return math.fsum(
        len(values) * math.log(len(values) / values.count(max(values))) for values in _members(scores, groups)
    ) / len(scores)


def tilted(scores: Sequence[float], coef: float, groups: Sequence[Hashable] | None = None) -> Tilt:
    """KL, score gain and effective sample size of the tilt at `coef`.

    groups: the prompt of each score, where each prompt is tilted by itself; None = one sample.
    """
    if groups is not None:
        parts = _members(scores, groups)
        kls, gains, sizes = zip(*(tilted(part, coef) for part in parts), strict=True)
        shares = [len(part) / len(scores) for part in parts]
        kl, gain = (math.fsum(map(mul, shares, values)) for values in (kls, gains))
        return Tilt(kl, gain, math.fsum(sizes))
    top = max(scores)
    powers = [(score - top) / coef for score in scores]
    raw = [math.exp(power) for power in powers]
    total = math.fsum(raw)
    # sum w log(n w) with log w = power - log total: no log of an underflown weight
    mean_power = math.fsum(r * p for r, p in zip(raw, powers, strict=True)) / total
    kl = max(0.0, mean_power - math.log(total) + math.log(len(scores)))
    gain = math.fsum(r * s for r, s in zip(raw, scores, strict=True)) / total - math.fsum(scores) / len(scores)
    return Tilt(kl, gain, total * total / math.fsum(r * r for r in raw))


def solve_tilt(
    scores: Sequence[float], target_kl: float, *, groups: Sequence[Hashable] | None = None, min_ess: float = MIN_ESS
) -> Solution:
    """The coef whose tilt has `target_kl` nats per sequence, or 0.99 of its limit, by bisection in log(coef).

    If the effective sample size would fall below `min_ess`, extrapolates from the last reliable point with the
    Gaussian rule KL ~ 1/coef^2, which gives a larger (safer) coef when scores saturate.
    groups: as in `tilted`; a prompt's own samples count however few they are.
    Raises ValueError for a target that is not positive, or scores that are constant or too few.
    """
    if not (math.isfinite(target_kl) and target_kl > 0.0):
        raise ValueError(f"target_kl must be above 0, got {target_kl!r}")
    mean = math.fsum(scores) / max(1, len(scores))
    spread = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / max(1, len(scores)))
    limit = kl_limit(scores, groups) if scores else 0.0
    if not spread > 1e-12 * max(1.0, abs(mean)) or not limit:
        raise ValueError("scores are constant, so beta has no effect")
    if groups is not None:
        min_ess = 0.0
    elif len(scores) <= min_ess:
        raise ValueError(f"{len(scores)} scores are too few for an effective sample size of {min_ess:g}")
    goal = min(target_kl, REACHED * limit)
    low, high = math.log(spread) - 15.0, math.log(spread) + 15.0
    for _ in range(50):  # KL falls and ess rises with coef: the larger of the two roots is sought
        middle = (low + high) / 2.0
        tilt = tilted(scores, math.exp(middle), groups)
        if tilt.ess < min_ess or tilt.kl > goal:
            low = middle
        else:
            high = middle
    measured = math.exp(high)
    tilt = tilted(scores, measured, groups)
    beyond = 1.0 if tilt.kl >= 0.999 * goal else math.sqrt(tilt.kl / goal)
    return Solution(beyond * measured, tilt, measured, limit)


def gain_at_kl(
    scores: Sequence[float], kl: float, *, groups: Sequence[Hashable] | None = None, min_ess: float = MIN_ESS
) -> float | None:
    """Upper limit of the score gain at `kl` nats per sequence; None if the samples are too few to have that KL."""
    if not math.isfinite(kl) or (groups is None and len(scores) <= min_ess):
        return None
    if kl <= 0.0:
        return 0.0
    solution = solve_tilt(scores, kl, groups=groups, min_ess=min_ess)
    return None if solution.extrapolated or kl > solution.limit else solution.tilt.gain


def _members(scores: Sequence[float], groups: Sequence[Hashable] | None) -> list[list[float]]:
    """The scores of each group, in the order of their first score; one group if there are no others."""
    if groups is None:
        return [list(scores)]
    members: dict[Hashable, list[float]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        members[group].append(float(score))
    return list(members.values())


def least_kl(curve: Sequence[Mapping[str, float]], gain: float) -> float:
    """The least KL, in nats per sequence, of any policy whose mean score is `gain` above the reference's.

    `curve`: points of the tilt (`coef`, `kl`, `gain`); with 24 between 1e-3 nats and the limit of the samples it is
    within 1 % below the exact figure. Beyond the last point it is only a lower bound.
    Source: Donsker and Varadhan 1983: KL >= gain / beta - log E_ref exp((score - mean) / beta) at every beta, which
    for the tilt is an equality: so each point gives a tangent of the convex KL(gain).
    """
    return max([0.0, *(point["kl"] + (gain - point["gain"]) / point["coef"] for point in curve)])


def normal_limit(spread: float, curve: Sequence[Mapping[str, float]], kl: float) -> float | None:
    """spread * sqrt(2 KL): the most that any policy can gain at `kl` nats per sequence where scores are near Gaussian.

    `spread`: the standard deviation of the reference's scores; `curve`: points of their tilt. None where that differs
    from the law by more than a tenth at this KL, or ends below it.
    Source: Mroueh 2024, 2406.05883, theorem 1 (scores that are sub-Gaussian under the reference).
    """
    limit = spread * math.sqrt(2.0 * max(0.0, kl))
    for before, after in pairwise(sorted(curve, key=lambda point: point["kl"])):
        if before["kl"] <= kl <= after["kl"]:
            low, high = (point["gain"] / math.sqrt(2.0 * point["kl"]) for point in (before, after))
            share = (kl - before["kl"]) / ((after["kl"] - before["kl"]) or 1.0)
            near = math.isclose(low + share * (high - low), spread, rel_tol=NEAR_NORMAL)
            return limit if near else None
    return None


class BestOfN(NamedTuple):
    n: int
    kl_bound: float  # nats per sequence
    gain: float  # mean score of the best minus the mean score of all


def kl_bound(n: int) -> float:
    """Upper bound of KL(best of n || reference), nats per sequence."""
    return math.log(n) - (n - 1) / n


def best_of_n(scores: Sequence[float], groups: Sequence[Hashable]) -> list[BestOfN]:
    """The curve for n = 1, 2, 4, ..., if half of the groups have n samples (a group = the responses to a prompt).

    The mean is over all subsets of n, not over one draw.
    """
    members, curve, n = _members(scores, groups), [], 1
    while members and 2 * len(large := [group for group in members if len(group) >= n]) >= len(members):
        gain = fmean(_expected_best(group, n) for group in large) - fmean(map(fmean, large))
        curve.append(BestOfN(n, kl_bound(n), gain))
        n *= 2
    return curve


def _expected_best(scores: Sequence[float], n: int) -> float:
    """Mean score of the best of n over all subsets of the scores: the i-th smallest is the best of C(i - 1, n - 1)."""
    best, weight = 0.0, n / len(scores)
    for i, score in zip(range(len(scores) - 1, -1, -1), sorted(scores, reverse=True), strict=True):
        best += weight * score
        weight *= (i - n + 1) / max(i, 1)
    return best
