"""A comparison as rows of texts, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_kl.report.compare import Comparison, EqualKL, Variant
from rlhf_kl.report.text import percent, shown

COLUMNS = ("variant", "seeds", "tail error", "in band", "peak", "KL", "score", "gold", "perplexity", "cost")


def rows(comparison: Comparison) -> list[list[str]]:
    """One row a variant: means over seeds, with one standard deviation where there are several."""
    return [
        [
            variant.name,
            str(len(variant.runs)),
            _spread(variant, "tail_error"),
            percent(variant.mean("time_in_band")),
            f"{shown(variant.mean('peak'), 2)}x",
            _spread(variant, "kl"),
            _spread(variant, "scores"),
            _spread(variant, "gold"),
            _spread(variant, "perplexity"),
            percent(variant.mean("perplexity_cost"), signed=True),
        ]
        for variant in comparison.variants
    ]


def equal_rows(entries: Sequence[EqualKL]) -> list[dict[str, str]]:
    """The scores at equal KL in words."""
    return [
        {
            "points": entry.points,
            "curve": entry.curve,
            "measure": "score" if entry.measure == "scores_shaped" else "gold",
            "mean": "not comparable" if entry.mean is None else f"{entry.mean:+.2f}",
            "interval": "-" if entry.interval is None else f"{entry.interval[0]:+.2f} to {entry.interval[1]:+.2f}",
            "seeds": str(len(entry.differences)),
            "each": ", ".join(f"{value:+.2f}" for value in entry.differences.values()),
        }
        for entry in entries
    ]


def text_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one to the left."""
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *body)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _spread(variant: Variant, name: str) -> str:
    mean, sd = variant.mean(name), variant.sd(name)
    text = shown(mean, 3 if mean is None or abs(mean) >= 1 else 2)
    decimals = len(text.partition(".")[2]) if "e" not in text else 1
    return text if sd is None else f"{text} ±{sd:.{decimals}f}"
