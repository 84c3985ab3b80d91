"""The closing figures of a run and whether it held its KL target, as tables, cards and pages show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_kl.control import adjusts
from rlhf_kl.control.held import BAND_FROM, end, near_target, ratios, tail_error, time_in_band, verdict
from rlhf_kl.text import format_number, read_number

StartEnd = tuple[float | None, float | None]


def is_update(row: Mapping[str, Any]) -> bool:
    """False for the row of a closing evaluation, which is no update."""
    return "kl/error" in row


def worth(row: Mapping[str, Any], coef: float | None) -> float:
    """A figure by which the rows of one run can be compared; NaN or -inf for a row that does not count.

    coef: a beta that does not depend on the KL: the shaped score less coef times the KL of a response. None: beta
    follows the KL, so score - beta * KL means another thing in each row; then it is the shaped score, in rows whose
    KL is near the target or below.
    """
    if coef is None:
        return float(row["objective/scores_shaped"]) if near_target(row) else -math.inf
    return float(row["objective/scores_shaped"] - coef * row["kl/sequence"])


def control_figures(rows: Sequence[Mapping[str, Any]], kl: Any) -> dict[str, Any]:
    """The figures that judge a run, for its summary, its card and its pages; what they mean: see `held.verdict`.

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
    "short": "{share:.0%} of the target {target:g} in {updates} updates: too short to say more ({why})",
    None: "no target (beta does not depend on the KL)",
}


def why_short(figures: Mapping[str, Any]) -> str:
    """Why a run is too short to say; `figures`: of `control_figures`."""
    reached = f"in band only from update {figures['since']} on" if figures["since"] else "the KL still rises"
    return f"under {BAND_FROM} updates" if figures["updates"] < BAND_FROM else reached


def verdict_text(figures: Mapping[str, Any]) -> str:
    """The verdict in words; `figures`: of `control_figures`."""
    share = (figures["kl"] or 0.0) / figures["target"]
    return WORDS[figures["verdict"]].format_map({**figures, "share": share, "why": why_short(figures)})


CLOSING = {
    "scores": "objective/scores", "scores_shaped": "objective/scores_shaped", "gold": "objective/gold",
    "kl_sequence": "kl/sequence", "beta": "kl/coef", "length": "rollout/response_length",
    "perplexity": "eval/perplexity", "forward_kl_token": "eval/forward_kl_token", "distinct_2": "eval/distinct_2",
}  # fmt: skip


def closing_figures(rows: Sequence[Mapping[str, Any]], unit: str = "token") -> dict[str, StartEnd]:
    """Start and end of each figure that was measured: the first update, and the mean of the last ten (`end`).

    rows: those of all updates, and of the closing evaluation. What only evaluations measure (`eval/*`): the first and
    the last evaluation. unit: of `kl`.
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


def start_to_end(figure: StartEnd) -> str:
    """`0.780 -> 3.43`; a figure without a start alone."""
    return " -> ".join(format_number(value) for value in figure if value is not None) or "-"


def score_error(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard error of the score at the end, a mean over updates: that of their batches; None where a row lacks it."""
    last = end([row for row in rows if is_update(row)])
    errors = [error for row in last if (error := read_number(row, "objective/scores_stderr")) is not None]
    return math.hypot(*errors) / len(errors) if errors and len(errors) == len(last) else None


def score_text(figure: StartEnd, error: float | None) -> str:
    """`0.780 -> 3.43 (±0.021 at the end)`."""
    return start_to_end(figure) + ("" if error is None else f" (±{format_number(error)} at the end)")


def closing_note(updates: int) -> str:
    """What the two values of a closing figure are, in a run of that many updates."""
    count = len(end(range(updates)))
    return f"start -> mean of the last {count} update{'s' * (count != 1)} (perplexity: the end)"


def source_name(source: str | None) -> str:
    """A name to be shared: a hub id, or of a local path no folder but that of a run."""
    path = Path(source or "")
    if not path.is_absolute():
        return source or ""
    return path.parent.name if path.name in ("final", "merged") else path.name
