"""What each term of a sum is like, and what it gives to the sum, on reference samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_kl.ops.masked import correlation


def term_figures(raw: Mapping[str, Tensor], adds: Mapping[str, Tensor], total: Tensor) -> dict[str, dict[str, Any]]:
    """By the name of a term: `mean` and `std` of its own scores, `scored`, `share`, and `correlation` with the others.

    `scored`: the share of responses that it scores. `share`: of the variance of the sum, its covariance with the sum
    over that variance; the shares add up to 1, and that of a term against which the others work is below 0. None:
    unknown.

    raw, adds: its own scores and what it adds to the sum, (N,), NaN = not scored. `total`: the sum (N,).
    """
    figures: dict[str, dict[str, Any]] = {}
    scaled: dict[str, Tensor] = {}
    rest = total - total.mean()
    for name, scores in raw.items():
        known = scores[~scores.isnan()]
        mean, std = (float(known.mean()), float(known.std(correction=0))) if len(known) else (None, None)
        scaled[name] = (scores.double() - (mean or 0.0)) / (std or 1.0)
        share = float(adds[name].nan_to_num(nan=0.0) @ rest / (rest @ rest)) if bool(rest.any()) else None
        figures[name] = {"mean": mean, "std": std, "scored": len(known) / len(scores), "share": share}
    for name, own in scaled.items():
        both = {other: ~(own.isnan() | x.isnan()) for other, x in scaled.items() if other != name}
        found = {other: correlation(own[rows], scaled[other][rows]) for other, rows in both.items()}
        figures[name]["correlation"] = found
    return figures
