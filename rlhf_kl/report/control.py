"""How well a run held its KL target: the one definition of the figures that tables, charts and benchmarks show.

All take KL / target of each update, in order; a KL that is not finite counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers import adjusts
from rlhf_kl.text import format_number, read_number

BAND = 0.25  # a KL within this share of the target is in band
BAND_FROM = 15  # first update that counts for time in band: before, a KL that starts at 0 still rises
HELD_ERROR = BAND / 2  # of a run that held its target: at most this tail error,
HELD_SHARE = 0.9  # and at least this share of its updates in band
END = 10  # updates that closing figures are averaged over

Item = TypeVar("Item")
StartEnd = tuple[float | None, float | None]


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
    kept, total, inside, since, error = off <= HELD_ERROR and share >= HELD_SHARE, 0.0, 0, None, None
    judged = values if kept else tail(values) if off > HELD_ERROR else values[BAND_FROM - 1 :]
    for count, distance in enumerate((abs(value - 1.0) for value in reversed(judged)), start=1):
        total, inside = total + distance, inside + (distance <= BAND)
        if count >= END and distance <= BAND and total / count <= HELD_ERROR and inside / count >= HELD_SHARE:
            since, error = len(values) - count + 1, total / count
    if kept or since is not None:
        return "held" if kept else "late", since, error
    last = end(values)
    now, before = fmean(last), fmean(values[-2 * len(last) : -len(last)])
    climbed = before < min(now, 1.0 - BAND) and now <= 1.0 + BAND and now * now >= before * (1.0 - BAND)
    if climbed and abs(values[-1] - 1.0) <= BAND:  # since the update after the last one outside the band
        return "short", 2 + max(i for i, value in enumerate(values) if abs(value - 1.0) > BAND), None
    return "short" if climbed and fmean(tail(last)) > fmean(last[: len(last) // 2]) else "missed", None, None


def control_figures(rows: Sequence[Mapping[str, Any]], kl: Any) -> dict[str, Any]:
    """The figures that judge a run, for its summary, its card and its pages; what they mean: see `verdict`.

    rows: those of all updates. kl: the section of the config. A beta that does not depend on the KL has no verdict.
    """
    values = ratios(rows)
    word, since, error = verdict(values) if adjusts(kl.controller.kind) else (None, None, None)
    return {
        "kl": closing_figures(rows, kl.unit).get("kl", (None, None))[1],
        "target": kl.target_value, "unit": kl.unit, "updates": len(rows),
        "tail_error": tail_error(values), "time_in_band": time_in_band(values),
        "verdict": word, "since": since, "error_since": error,
    }  # fmt: skip


WORDS = {
    "held": "target {target:g} held (within {tail_error:.0%} on average)",
    "late": "target {target:g} reached late (in band from update {since} on, within {error_since:.0%} since)",
    "missed": "target {target:g} missed (off by {tail_error:.0%} on average)",
    "short": "target {target:g}: too short to say ({why})",
    None: "no target (beta does not depend on the KL)",
}


def why_short(figures: Mapping[str, Any]) -> str:
    """Why a run is too short to say; `figures`: of `control_figures`."""
    reached = f"in band only from update {figures['since']} on" if figures["since"] else "the KL still rises"
    return f"under {BAND_FROM} updates" if figures["updates"] < BAND_FROM else reached


def verdict_text(figures: Mapping[str, Any]) -> str:
    """The verdict in words; `figures`: of `control_figures`."""
    return WORDS[figures["verdict"]].format_map({**figures, "why": why_short(figures)})


CLOSING = {
    "score": "objective/scores", "shaped_score": "objective/scores_shaped", "gold": "objective/gold",
    "sequence_kl": "kl/sequence", "beta": "kl/coef", "length": "rollout/response_length",
    "perplexity": "eval/perplexity", "forgetting": "eval/forward_kl_token",
}  # fmt: skip


def closing_figures(rows: Sequence[Mapping[str, Any]], unit: str = "token") -> dict[str, StartEnd]:
    """Start and end of each figure that was measured: the first update, and the mean of the last ten (`end`).

    rows: those of all updates, and of the closing evaluation. What only evaluations measure (`perplexity`,
    `forgetting`): the first and the last evaluation. unit: of `kl`.
    """

    def numbers(some: Sequence[Mapping[str, Any]], key: str) -> list[float]:
        return [value for row in some if (value := read_number(row, key)) is not None]

    updates = [row for row in rows if is_update(row)]
    figures: dict[str, StartEnd] = {}
    for name, key in {"kl": f"kl/{unit}", **CLOSING}.items():
        first, last = numbers(updates[:1], key), numbers(end(updates), key)
        if key.startswith("eval/"):
            found = numbers(rows, key)
            first, last = found[:-1][:1], found[-1:]
        if last:
            figures[name] = (first[0] if first else None, fmean(last))
    return figures


def start_to_end(figure: StartEnd, digits: int = 3) -> str:
    """`0.780 -> 3.43`; a figure without a start alone."""
    return " -> ".join(format_number(value, digits) for value in figure if value is not None) or "-"


def closing_note(updates: int, config: TrainConfig) -> str:
    """What the two values of a closing figure are, in a run of that many updates."""
    count, start = len(end(range(updates))), "start"
    if goes_on(config):
        start += f" (the policy of {source_name(config.policy.model)}, not the reference)"
    return f"{start} -> mean of the last {count} update{'s' * (count != 1)} (perplexity: the end)"


def goes_on(config: TrainConfig) -> bool:
    """Whether a run starts from the policy of another run, and not from its reference."""
    return config.reference.model not in (None, config.policy.model) and Path(config.policy.model).name == "final"


def source_name(source: str | None) -> str:
    """A name to be shared: a hub id, or of a local path no folder but that of a run."""
    path = Path(source or "")
    if not path.is_absolute():
        return source or ""
    return path.parent.name if path.name in ("final", "merged") else path.name
