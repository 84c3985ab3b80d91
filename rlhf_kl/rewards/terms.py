"""What each term of a sum is like, and what it gives to the sum, on reference samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_kl.ops.masked import correlation
from rlhf_kl.types import REWARD, TERM


def term_figures(raw: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """By the name of a term: `mean` and `std` of its own scores, `scored`, `share`, and `correlation` with the others.

    `scored`: the share of responses that it scores. `share`: of the variance of the sum, its covariance with the sum
    over that variance; the shares add up to 1, and that of a term against which the others work is below 0. None:
    unknown.

    raw: own scores (N,) of each term, NaN = not scored. sums: what `Scorers.add_up` makes of them.
    """
    figures: dict[str, dict[str, Any]] = {}
    scaled: dict[str, Tensor] = {}
    for name, scores in raw.items():
        known, rest = scores[~scores.isnan()], sums[REWARD] - sums[REWARD].mean()
        mean, std = (float(known.mean()), float(known.std(correction=0))) if len(known) else (None, None)
        share = float(sums[TERM + name].nan_to_num(nan=0.0) @ rest / (rest @ rest)) if bool(rest.any()) else None
        figures[name] = {"mean": mean, "std": std, "scored": len(known) / len(scores), "share": share}
        scaled[name] = (scores.double() - (mean or 0.0)) / (std or 1.0)
    for name, own in scaled.items():
        both = {other: ~(own.isnan() | x.isnan()) for other, x in scaled.items() if other != name}
        found = {other: correlation(own[rows], scaled[other][rows]) for other, rows in both.items()}
        figures[name]["correlation"] = found
    return figures
