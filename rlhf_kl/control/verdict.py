"""How well a run held its KL target: the one definition, and its words, for all that shows or judges a run.

Most take KL / target of each update, in order; a KL that is not finite counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

# By definition, not fitted: what a run is judged by.
BAND = 0.25  # a KL within this share of the target is in band
BAND_FROM = 15  # first update that counts for time in band: before, a KL that starts at 0 still rises
HELD_SHARE = 0.9  # of a run that held its target: updates in band, at least; its tail error is at most half of BAND
END = 10  # updates that closing figures are averaged over
WORDS = {
    "held": "target {target:g} held (off by {tail_error:.0%} on average in its second half)",
    "late": "target {target:g} reached late (in band from update {since} on, off by {error_since:.0%} since)",
    "missed": "target {target:g} missed (off by {tail_error:.0%} on average in its second half)",
    "short": "{share:.0%} of the target {target:g} in {updates} updates: too short to say more ({why})",
    None: "no target is held (beta does not depend on the KL)",
}

Item = TypeVar("Item")


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """KL / target of each row, in the target's unit."""
    return [math.inf if row["kl/error"] is None else row["kl/error"] + 1.0 for row in rows]


def in_band(ratio: float) -> bool:
    """Whether a KL over its target is within 25 % of it."""
    return abs(ratio - 1.0) <= BAND


def near_target(row: Mapping[str, Any]) -> bool:
    """Whether the KL of a row is in band or below: at most 1.25 times the target."""
    return row["kl/error"] is not None and row["kl/error"] <= BAND


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
    return fmean(map(in_band, late)) if late else None


def verdict(values: Sequence[float]) -> tuple[str, int | None, float | None]:
    """`held`, `late`, `missed` or `short`; the update from which the KL stayed in band; its mean distance since.

    held: by tail error and time in band. late: it failed by its beginning, and would pass from an update in band on,
    ten or more before the end. short: fewer than 15 updates; or the mean KL of the last ten (`end`) rose so far over
    that of the ten before, below the band, that the same factor once more brings it into the band, and it still rises
    among these ten, or has come into the band (then from the named update on). missed: all else.
    """
    off, share = tail_error(values), time_in_band(values)
    if off is None or share is None:
        return "short", None, None
    kept, total, inside, since, error = off <= BAND / 2 and share >= HELD_SHARE, 0.0, 0, None, None
    judged = values if kept else tail(values) if off > BAND / 2 else values[BAND_FROM - 1 :]
    for count, distance in enumerate((abs(value - 1.0) for value in reversed(judged)), start=1):
        total, inside = total + distance, inside + (distance <= BAND)
        if count >= END and distance <= BAND and total / count <= BAND / 2 and inside / count >= HELD_SHARE:
            since, error = len(values) - count + 1, total / count
    if kept or since is not None:
        return "held" if kept else "late", since, error
    last = end(values)
    now, before = fmean(last), fmean(values[-2 * len(last) : -len(last)])
    climbed = before < min(now, 1.0 - BAND) and now <= 1.0 + BAND and now * now >= before * (1.0 - BAND)
    if climbed and in_band(values[-1]):  # since the update after the last one outside the band
        return "short", 2 + max(i for i, value in enumerate(values) if not in_band(value)), None
    return "short" if climbed and fmean(tail(last)) > fmean(last[: len(last) // 2]) else "missed", None, None


def verdict_text(figures: Mapping[str, Any]) -> str:
    """The verdict in words; `figures`: of `control_figures`."""
    share = (figures["kl"] or 0.0) / figures["target"]
    return WORDS[figures["verdict"]].format_map({**figures, "share": share, "why": why_short(figures)})


def why_short(figures: Mapping[str, Any]) -> str:
    """Why a run is too short to say; `figures`: of `control_figures`."""
    reached = f"in band only from update {figures['since']} on" if figures["since"] else "the KL still rises"
    return f"under {BAND_FROM} updates" if figures["updates"] < BAND_FROM else reached
