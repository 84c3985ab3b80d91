"""The best policy for a KL budget, from scores of reference samples only.

The optimum of E[score] - beta * KL(pi || ref) is the tilt pi* = ref * exp(score / beta) / Z (Korbak et al.
2022, 2205.11275; Rafailov et al. 2023, appendix A.1). With n samples of the reference and weights
w = softmax(score / beta): KL(beta) = sum w log(n w), score gain(beta) = sum w score - mean score. For
Gaussian scores of spread sigma this is KL = sigma^2 / (2 beta^2), gain = sigma * sqrt(2 KL); real scores
saturate. KL is per *sequence*, in nats.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

MIN_ESS = 30.0  # below this, a few samples have most of the weight, and both figures are too low


class Tilt(NamedTuple):
    kl: float  # nats per sequence, KL(tilt || reference)
    gain: float  # mean score of the tilt minus mean score of the reference
    ess: float  # effective sample size, 1 / sum w^2


class Solution(NamedTuple):
    coef: float
    tilt: Tilt  # at the smallest reliable coef if extrapolated
    extrapolated: bool

    @property
    def note(self) -> str:
        """One line if the figure is extrapolated; empty if it is measured."""
        if not self.extrapolated:
            return ""
        return (
            f"starting beta {self.coef:.4g} is extrapolated: the reference samples measure beta only up to a KL of "
            f"{self.tilt.kl:.3g} nats per response, and the target is higher. More samples measure further"
        )


def centre_groups(scores: Sequence[float], groups: Sequence[Hashable], *, scale: bool = False) -> list[float]:
    """Scores minus the mean of their group (a group = the responses to one prompt).

    A policy can only use the differences within a prompt. The rest of a group of m is scaled by
    sqrt(m / (m - 1)), which keeps the within-group variance right when m is small. Groups of one have
    no spread and are left out, unless there are no others: then the common mean is subtracted.
    scale: divide them by their group's standard deviation, if it has one.
    """
    if len(scores) != len(groups):
        raise ValueError(f"{len(scores)} scores but {len(groups)} groups")
    members: dict[Hashable, list[float]] = defaultdict(list)
    for score, group in zip(scores, groups, strict=True):
        members[group].append(float(score))
    usable = [values for values in members.values() if len(values) > 1]
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


def tilted(scores: Sequence[float], coef: float) -> Tilt:
    """KL, score gain and effective sample size of the tilt at `coef`.

    Raises ValueError when there are no scores or coef is not above 0.
    """
    if not scores or not coef > 0.0:
        raise ValueError("tilted needs at least one score and a coef above 0")
    top = max(scores)
    powers = [(score - top) / coef for score in scores]
    raw = [math.exp(power) for power in powers]
    total = math.fsum(raw)
    # sum w log(n w) with log w = power - log total: no log of an underflown weight
    mean_power = math.fsum(r * p for r, p in zip(raw, powers, strict=True)) / total
    kl = max(0.0, mean_power - math.log(total) + math.log(len(scores)))
    gain = math.fsum(r * s for r, s in zip(raw, scores, strict=True)) / total - math.fsum(scores) / len(scores)
    return Tilt(kl, gain, total * total / math.fsum(r * r for r in raw))


def solve_tilt(scores: Sequence[float], target_kl: float, *, min_ess: float = MIN_ESS) -> Solution:
    """The coef whose tilt has `target_kl` nats per sequence, by bisection in log(coef).

    If the effective sample size would fall below `min_ess`, extrapolates from the last reliable point with the
    Gaussian rule KL ~ 1/coef^2, which gives a larger (safer) coef when scores saturate.
    Raises ValueError for a target that is not positive, or scores that are constant or too few.
    """
    if not (math.isfinite(target_kl) and target_kl > 0.0):
        raise ValueError(f"target_kl must be above 0, got {target_kl!r}")
    mean = math.fsum(scores) / max(1, len(scores))
    spread = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / max(1, len(scores)))
    if not spread > 1e-12 * max(1.0, abs(mean)):
        raise ValueError("scores are constant, so beta has no effect")
    if len(scores) <= min_ess:
        raise ValueError(f"{len(scores)} scores are too few for an effective sample size of {min_ess:g}")
    low, high = math.log(spread) - 15.0, math.log(spread) + 15.0
    for _ in range(50):  # KL falls and ess rises with coef: the larger of the two roots is sought
        middle = (low + high) / 2.0
        tilt = tilted(scores, math.exp(middle))
        if tilt.ess < min_ess or tilt.kl > target_kl:
            low = middle
        else:
            high = middle
    tilt = tilted(scores, math.exp(high))
    if tilt.kl >= 0.999 * target_kl:
        return Solution(math.exp(high), tilt, extrapolated=False)
    return Solution(math.exp(high) * math.sqrt(tilt.kl / target_kl), tilt, extrapolated=True)


def gain_at_kl(scores: Sequence[float], kl: float, *, min_ess: float = MIN_ESS) -> float | None:
    """Upper limit of the score gain at `kl` nats per sequence; None if the samples are too few."""
    if not math.isfinite(kl) or len(scores) <= min_ess:
        return None
    if kl <= 0.0:
        return 0.0
    solution = solve_tilt(scores, kl, min_ess=min_ess)
    return None if solution.extrapolated else solution.tilt.gain


def least_kl(curve: Sequence[Mapping[str, float]], gain: float) -> float:
    """The least KL, in nats per sequence, of any policy whose mean score is `gain` above the reference's.

    `curve`: points of the tilt (`coef`, `kl`, `gain`); with 24 between 1e-3 nats and the limit of the samples it is
    within 1 % below the exact figure. Beyond the last point it is only a lower bound.
    Source: Donsker and Varadhan 1983: KL >= gain / beta - log E_ref exp((score - mean) / beta) at every beta, which
    for the tilt is an equality: so each point gives a tangent of the convex KL(gain).
    """
    return max([0.0, *(point["kl"] + (gain - point["gain"]) / point["coef"] for point in curve)])
