"""A comparison as rows of texts, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_kl.report.compare import Comparison
from rlhf_kl.report.equal_kl import EqualKL
from rlhf_kl.report.variant import Variant
from rlhf_kl.run.figures import format_number, format_percent

COLUMNS = ("variant", "seeds", "tail error", "in band", "peak", "KL", "score", "gold", "perplexity", "cost")


def variant_rows(comparison: Comparison) -> list[list[str]]:
    """One row for each variant: means over seeds, with one standard deviation if there are several."""
    return [
        [
            variant.name,
            str(len(variant.runs)),
            _mean_and_sd(variant, "tail_error"),
            format_percent(variant.mean("time_in_band")),
            f"{format_number(variant.mean('peak'), 2)}x",
            *(_mean_and_sd(variant, name) for name in ("kl", "scores", "gold", "perplexity")),
            format_percent(variant.mean("perplexity_cost"), signed=True),
        ]
        for variant in comparison.variants
    ]


def equal_kl_rows(entries: Sequence[EqualKL]) -> list[list[str]]:
    """Scores at equal KL: points, curve, measure, mean difference, interval, number of seeds, each difference."""
    return [
        [
            entry.points,
            entry.curve,
            "score" if entry.measure == "scores_shaped" else "gold",
            "not comparable" if entry.mean is None else f"{entry.mean:+.2f}",
            "-" if entry.interval is None else f"{entry.interval[0]:+.2f} to {entry.interval[1]:+.2f}",
            str(len(entry.differences)),
            ", ".join(f"{value:+.2f}" for value in entry.differences.values()),
        ]
        for entry in entries
    ]


def text_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, the first one left-aligned; cells beyond the header are left out."""
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in (header, *body)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _mean_and_sd(variant: Variant, name: str) -> str:
    mean, sd = variant.mean(name), variant.sd(name)
    text = format_number(mean, 3 if mean is None or abs(mean) >= 1 else 2)
    decimals = len(text.partition(".")[2]) if "e" not in text else 1
    return text if sd is None else f"{text} ±{sd:.{decimals}f}"
