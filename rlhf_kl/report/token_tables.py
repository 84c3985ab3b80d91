"""Tables of the tokens that carry the KL, for the terminal and for pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_kl.monitors.kl_shares import EOS, SPECIAL
from rlhf_kl.text import format_number, hanging, text_table, visible

TITLE = "Which tokens carry the KL"
NOTE = "KL at a token: exact, of the distribution that it was drawn from; nats. Held-out responses."
LONGEST = 20  # characters of a token
STEPS = 1000  # shares are told in tenths of a percent
MARKS = {EOS: " (EOS)", SPECIAL: " (special)"}

Table = tuple[list[str], list[list[str]]]  # names of columns, and rows of cells


def token_tables(shares: Mapping[str, Any]) -> tuple[Table, Table]:
    """Of `kl_shares`: by token and by place, each with all of them in the last row."""
    header = ["count", "mean KL", "share"]
    by_token, by_place = (_rows(shares[name], shares["all"]) for name in ("tokens", "places"))
    return (["token", *header, "by the policy"], by_token), (["place", *header], [cells[:-1] for cells in by_place])


def tables_text(shares: Mapping[str, Any] | None, width: int) -> str:
    """The same for a terminal, with what it means."""
    if shares is None:
        return f"{TITLE}: there is none."
    lines = [hanging(line, width, 0) for line in (f"{TITLE}. {NOTE}", *shares["meaning"])]
    return "\n\n".join(["\n".join(lines), *(text_table(*table) for table in token_tables(shares))])


def largest(shares: Mapping[str, Any]) -> str:
    """The three tokens with the largest shares, in words."""
    rows = [row for row in shares["tokens"] if row["id"] is not None]
    return ", ".join(f"{_name(row)} {row['share']:.0%}" for row in sorted(rows, key=lambda row: -row["share"])[:3])


def _rows(rows: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]) -> list[list[str]]:
    steps = in_steps([row["share"] for row in rows], STEPS)
    shown = zip([*rows, whole], [*steps, STEPS], strict=True)
    return [
        [_name(row), f"{row['count']}", format_number(row["mean_kl"]), f"{100 * n / STEPS:.1f}%", _likelier(row)]
        for row, n in shown
    ]


def in_steps(shares: Sequence[float], steps: int) -> list[int]:
    """Whole numbers of steps, which add up to `steps`: the shares with the largest remainders are rounded up."""
    exact = [share * steps for share in shares]
    counts = list(map(math.floor, exact))
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: steps - sum(counts)]:
        counts[i] += 1
    return counts


def _name(row: Mapping[str, Any]) -> str:
    if row["id"] is None:
        return str(row["text"])
    text = visible(row["text"])
    return text[:LONGEST] + "…" * (len(text) > LONGEST) + MARKS.get(row["kind"], "")


def _likelier(row: Mapping[str, Any]) -> str:
    """How the policy's probability of the token compares with the reference's: the geometric mean of their ratio."""
    if row["id"] is None:
        return ""
    factor = format_number(math.exp(min(abs(row["logratio"]), 100.0)), 2)
    return "as likely" if factor == "1.0" else f"{factor}x {'more' if row['logratio'] > 0 else 'less'} likely"
