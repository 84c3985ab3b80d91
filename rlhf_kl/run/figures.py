"""Numbers: out of rows, and as people read them in tables, pages, pictures and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def read_number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number that a row has under `key`, else None."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def format_number(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, in at most 8 characters; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000 or size < 0.001:
        return f"{value:.1e}"
    decimals = digits - 1 - (math.floor(math.log10(size)) if size >= 1 else -1)
    return f"{value:.{max(0, min(decimals, 4))}f}"


def format_percent(value: float | None, *, signed: bool = False) -> str:
    """A share as whole percent."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else "∞"
    return f"{value:+.0%}" if signed else f"{value:.0%}"
