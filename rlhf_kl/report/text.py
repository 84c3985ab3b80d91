"""Figures in words, for tables, pages and pictures."""

from __future__ import annotations

import math


def shown(value: float | None, digits: int = 3) -> str:
    """A number for people: about `digits` significant ones, a dash where there is none."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000 or 0 < size < 0.001:
        return f"{value:.1e}"
    decimals = digits - 1 - (math.floor(math.log10(size)) if size >= 1 else -1)
    return f"{value:.{max(0, min(decimals, 4))}f}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share for people."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else "∞"
    return f"{value:+.0%}" if signed else f"{value:.0%}"
