"""A chart, and the matplotlib calls that several charts share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from rlhf_kl.report.control import BAND
from rlhf_kl.report.plots.style import colour
from rlhf_kl.run.figures import format_number

UPDATE = "update"
MOST_POINTS = 400  # of a line; a longer line is drawn as means of segments
FEW_POINTS = 12  # a line with fewer points has marks
LEGEND_COLUMNS = 3

Axes = Any  # matplotlib's, which has no annotations
Curve = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


class Place(NamedTuple):
    """A place in a chart with a text for the pointer, in data coordinates."""

    x: float
    y: float | None  # None: a whole column
    text: str


@dataclass(frozen=True)
class Chart:
    """A picture that can be drawn in several sizes, and the words around it."""

    slug: str
    title: str
    draw: Callable[[Axes], object]
    places: Sequence[Place] = ()
    caption: str = ""
    subtitle: str = ""


def thin(values: Sequence[float]) -> list[float]:
    """The values as means of at most 400 segments of equal length."""
    size = max(1, math.ceil(len(values) / MOST_POINTS))
    return [fmean(values[i : i + size]) for i in range(0, len(values), size)]


def columns(x_label: str, curves: Iterable[Curve], marks: Iterable[tuple[float, str]] = ()) -> list[Place]:
    """One place for each x of the curves: their values there, and the marks nearest to it."""
    texts: dict[float, list[str]] = {}
    for name, xs, ys in curves:
        for x, y in zip(thin(xs), thin(ys), strict=True):
            texts.setdefault(x, []).append(f"{name} {format_number(y)}")
    for x, text in marks:
        if texts:
            texts[min(texts, key=lambda at: abs(at - x))].append(text)
    return [Place(x, None, f"{x_label} {x:g}: {', '.join(texts[x])}") for x in sorted(texts)]


def plot_line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    tint: str,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    **style: Any,
) -> None:
    """A curve, with the band from `low` to `high` around it. `tint`: a name of `style.COLOURS`."""
    x, y = thin(x), thin(y)
    if axes.get_yscale() == "log":  # which cannot show 0
        y = [value if value > 0 else math.nan for value in y]
    if low is not None and high is not None:
        low = [
            bottom if bottom > 0 or axes.get_yscale() != "log" else value
            for bottom, value in zip(thin(low), y, strict=True)
        ]
        axes.fill_between(x, low, thin(high), color=colour(tint), alpha=0.13, linewidth=0, zorder=1.5)
    style = {"marker": "o" if len(x) < FEW_POINTS else "", "markersize": 3.2, "zorder": 2.5} | style
    axes.plot(x, y, color=colour(tint), **style)


def plot_points(axes: Axes, x: Sequence[float], y: Sequence[float], tint: str, **style: Any) -> None:
    """Single marks."""
    style = {"marker": "o", "markersize": 5.5, "zorder": 3} | style
    axes.plot(x, y, color=colour(tint), linestyle="none", **style)


def plot_level(axes: Axes, y: float, label: str, tint: str = "muted") -> None:
    """A horizontal line with its name."""
    axes.axhline(y, color=colour(tint), linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.2, label=label)


def plot_target(axes: Axes, target: float, label: str = "target") -> None:
    """A KL target and the band around it."""
    axes.axhspan((1 - BAND) * target, (1 + BAND) * target, color=colour("band"), zorder=0.5, linewidth=0)
    plot_level(axes, target, label, "c3")


def add_legend(axes: Axes) -> None:
    """The labels above the axes instead of at the ends of the lines."""
    count = len(axes.get_legend_handles_labels()[1])
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=min(LEGEND_COLUMNS, max(count, 1)), frameon=False,
        borderaxespad=0.1, handlelength=1.8, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip
    for handle in legend.legend_handles:
        if handle.get_linestyle() != "None":
            handle.set_marker("")
