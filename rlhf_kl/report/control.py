"""How well a run held its KL target: the one definition of the figures that tables, charts and benchmarks show.

All take KL / target of each update, in order; a KL that is not finite counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, TypeVar

BAND = 0.25  # a KL within this share of the target is in band
BAND_FROM = 15  # first update that counts for time in band: before, a KL that starts at 0 still rises
HELD_ERROR = BAND / 2  # of a run that held its target: at most this tail error,
HELD_SHARE = 0.9  # and at least this share of its updates in band
END = 10  # updates that closing figures are averaged over

Item = TypeVar("Item")


def is_update(row: Mapping[str, Any]) -> bool:
    """False for the row of a closing evaluation, which is no update."""
    return "kl/error" in row


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """KL / target of each row, in the target's unit."""
    return [math.inf if row["kl/error"] is None else row["kl/error"] + 1.0 for row in rows]


def near_target(row: Mapping[str, Any]) -> bool:
    """Whether the KL of a row is in band or below: at most 1.25 times the target."""
    return row["kl/error"] is not None and row["kl/error"] <= BAND


def worth(row: Mapping[str, Any], coef: float | None) -> float:
    """A figure by which the rows of one run can be compared; NaN or -inf for a row that does not count.

    coef: a beta that does not depend on the KL: the shaped score less coef times the KL of a response. None: beta
    follows the KL, so score - beta * KL means another thing in each row; then it is the shaped score, in rows whose
    KL is near the target or below.
    """
    if coef is None:
        return float(row["objective/scores_shaped"]) if near_target(row) else -math.inf
    return float(row["objective/scores_shaped"] - coef * row["kl/sequence"])


def tail(items: Sequence[Item]) -> Sequence[Item]:
    """The second half; the middle one of an odd number belongs to it."""
    return items[len(items) // 2 :]


def end(items: Sequence[Item]) -> Sequence[Item]:
    """The last ten; for a short run the second half."""
    return items[-END:] if len(items) >= 2 * END else tail(items)


def tail_error(values: Sequence[float]) -> float | None:
    """Mean of |KL/target - 1| over the second half."""
    return fmean(abs(value - 1.0) for value in tail(values)) if values else None


def time_in_band(values: Sequence[float]) -> float | None:
    """Share of the updates from number 15 on within 25 % of the target; None for a shorter run."""
    late = values[BAND_FROM - 1 :]
    return fmean(abs(value - 1.0) <= BAND for value in late) if late else None


def held(values: Sequence[float]) -> bool | None:
    """Whether a run held its target, by tail error and time in band; None for a run too short for the latter."""
    error, share = tail_error(values), time_in_band(values)
    return None if error is None or share is None else error <= HELD_ERROR and share >= HELD_SHARE


def closing_figures(rows: Sequence[Mapping[str, Any]], unit: str) -> dict[str, Any]:
    """For the summary of a run: mean KL of the last ten updates, tail error, time in band, and whether it held.

    rows: those of all updates. unit: of the target.
    """
    kls = [kl for row in end(rows) if (kl := row.get(f"kl/{unit}")) is not None]
    values = ratios(rows)
    return {
        "kl": fmean(kls) if kls else None,
        "tail_error": tail_error(values),
        "time_in_band": time_in_band(values),
        "held": held(values),
    }


def log_beta_sd(coefs: Sequence[float]) -> float | None:
    """Standard deviation of log beta over the second half of the updates; None without values, or if one is 0."""
    late = tail(coefs)
    return pstdev(map(math.log, late)) if late and min(late) > 0.0 else None
