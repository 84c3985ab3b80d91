"""A chart as data, and how it is drawn onto matplotlib axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_kl.report.plots.style import colour
from rlhf_kl.report.text import shown

MOST_POINTS = 400  # of a line; a longer one is drawn as means of so many stretches
LEGEND_COLUMNS, LEGEND_LINE = 3, 1.45  # height of a line in type sizes
LABEL_GAP = 1.15  # of the type size, between two labels at the ends of lines


@dataclass(frozen=True)
class Line:
    """A curve, or with `points` single marks."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "c1"  # a name of style.COLOURS
    dash: Any = "solid"
    width: float = 1.6
    marker: str | None = None  # "None": none, also where there are few points
    points: bool = False
    hollow: bool = False
    low: Sequence[float] | None = None  # a band around the curve
    high: Sequence[float] | None = None
    tips: Sequence[str] | None = None  # hover text of each point, else made from label and value
    named: bool = True  # has its label at the end
    drawn: bool = True  # False: only places to point at
    faint: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line with its name."""

    y: float
    label: str
    colour: str = "muted"


@dataclass(frozen=True)
class Mark:
    """Something that happened at an x: an alert, a peak."""

    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Everything that a picture shows."""

    slug: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    band: tuple[float, float] | None = None
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    log_x: bool = False
    log_y: bool = False
    y_limits: tuple[float, float] | None = None
    x_limits: tuple[float, float] | None = None
    caption: str = ""
    legend: bool = False  # names in a legend above instead of at the ends of the lines
    subtitle: str = ""

    @property
    def whole_x(self) -> bool:
        """Whether x counts something, so that ticks in between mean nothing."""
        return not self.log_x and all(float(x).is_integer() for line in self.lines for x in line.x)

    @property
    def empty(self) -> bool:
        return not any(len(line.x) for line in self.lines)


def thin(x: Sequence[float], *columns: Sequence[float] | None) -> list[list[float] | None]:
    """x and columns as means over at most 400 stretches of equal length."""
    size = max(1, math.ceil(len(x) / MOST_POINTS))
    if size == 1:
        return [list(x), *(None if column is None else list(column) for column in columns)]

    def means(values: Sequence[float]) -> list[float]:
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        return [math.fsum(part) / len(part) for part in parts]

    return [means(x), *(None if column is None else means(column) for column in columns)]


def draw(chart: Chart, axes: Any, size: float) -> None:
    """Everything of the chart onto `axes`; `size` of the type in points."""
    title = chart.title if not chart.subtitle else f"{chart.title}\n"
    shelf = LEGEND_LINE * size * -(-len(_in_legend(chart)) // LEGEND_COLUMNS)
    axes.set_title(title, pad=8 + shelf, loc="left")
    if chart.subtitle:
        axes.annotate(
            chart.subtitle, (0, 1), xytext=(0, 8 + shelf), xycoords="axes fraction", textcoords="offset points",
            fontsize=size * 0.9, color=colour("muted"), va="bottom",
        )  # fmt: skip
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    if chart.band is not None:
        axes.axhspan(*chart.band, color=colour("band"), zorder=0.5, linewidth=0)
    for level in chart.levels:
        axes.axhline(level.y, color=colour(level.colour), linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.2)
    for line in chart.lines:
        if line.drawn:
            _draw_line(chart, line, axes)
    if chart.legend:
        _draw_legend(chart, axes, size)
    if chart.y_limits is not None:
        axes.set_ylim(*chart.y_limits)
    elif not chart.log_y:
        axes.margins(y=0.08)
    if chart.x_limits is not None:
        axes.set_xlim(*chart.x_limits)
    if chart.log_x or chart.log_y:
        _plain_log_ticks(chart, axes)
    if chart.whole_x:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    for mark in chart.marks:
        axes.plot(
            [mark.x], [0.02], marker="^", color=colour("alert"), markersize=size * 0.62, linestyle="none",
            transform=axes.get_xaxis_transform(), clip_on=False, zorder=6,
        )  # fmt: skip


def _draw_line(chart: Chart, line: Line, axes: Any) -> None:
    tint = colour(line.colour)
    x, y, low, high = thin(line.x, line.y, line.low, line.high)
    x, y = x or [], y or []
    if chart.log_y:  # a log axis has no place for 0
        kept = [i for i, value in enumerate(y) if value > 0]
        x, y = [x[i] for i in kept], [y[i] for i in kept]
        low, high = ([max(band[i], y_) if band[i] <= 0 else band[i] for i, y_ in zip(kept, y, strict=True)]
                     if band is not None else None for band in (low, high))  # fmt: skip
    if low is not None and high is not None:
        axes.fill_between(x, low, high, color=tint, alpha=0.13, linewidth=0, zorder=1.5)
    few = len(x) < 12
    axes.plot(
        x,
        y,
        color=tint,
        linestyle="none" if line.points else line.dash,
        linewidth=line.width,
        marker=line.marker or ("o" if line.points or few else None),
        markersize=5.5 if line.points else 3.2,
        markerfacecolor="none" if line.hollow else tint,
        alpha=0.35 if line.faint else 1.0,
        zorder=3 if line.points else 2.5,
    )


def _in_legend(chart: Chart) -> list[Line]:
    named = [line for line in chart.lines if line.label and line.drawn and line.named]
    return named if chart.legend else []


def _draw_legend(chart: Chart, axes: Any, size: float) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=colour(line.colour), linestyle="none" if line.points else line.dash, linewidth=line.width,
            marker=(line.marker or "o") if line.points else None, markersize=5.5,
            markerfacecolor="none" if line.hollow else colour(line.colour), label=line.label,
        )
        for line in _in_legend(chart)
    ]  # fmt: skip
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(LEGEND_COLUMNS, len(handles)),
        fontsize=size * 0.9,
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.8,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _plain_log_ticks(chart: Chart, axes: Any) -> None:
    """1, 2 and 5 of each decade where there are few decades, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for on, axis, limits in ((chart.log_x, axes.xaxis, axes.get_xlim()), (chart.log_y, axes.yaxis, axes.get_ylim())):
        if on and min(limits) > 0:
            decades = math.log10(limits[1] / limits[0])
            subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.5 else (1.0,)
            axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def label_ends(chart: Chart, axes: Any, size: float) -> None:
    """The lines' names at their ends, and the levels' at the right, moved apart where they would overlap.

    After the layout is final: overlaps are told in points on the page.
    """
    scale = 72.0 / axes.figure.dpi
    box = axes.get_window_extent()
    wanted: list[tuple[float, str, str]] = []  # y in points, text, colour
    for line in chart.lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if not chart.log_y or y > 0]
        if line.named and line.label and points and not line.points and not chart.legend:
            wanted.append((_height(axes, points[-1][1]), line.label, line.colour))
    for level in chart.levels:
        wanted.append((_height(axes, level.y), level.label, level.colour))
    if not wanted:
        return
    gap, bottom, top = LABEL_GAP * size, box.y0 * scale, box.y1 * scale
    for place, (_, text, name) in zip(spread([w[0] for w in wanted], gap, bottom, top), wanted, strict=True):
        axes.annotate(
            text,
            (1, (place - bottom) / (top - bottom)),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=colour(name),
            fontsize=size * 0.92,
            va="center",
            annotation_clip=False,
        )


def _height(axes: Any, y: float) -> float:
    """Height of a value on the page in points, kept within the axes."""
    box = axes.get_window_extent()
    height = float(axes.transData.transform((axes.get_xlim()[1], y))[1])
    return min(max(height, float(box.y0)), float(box.y1)) * 72.0 / float(axes.figure.dpi)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, in the same order, at least `gap` apart, within [low, high] where all fit."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    # Blocks of touching labels, each at the mean of what its members want.
    blocks: list[tuple[list[int], float]] = []
    for index in order:
        blocks.append(([index], wanted[index]))
        while len(blocks) > 1 and _overlap(blocks[-2], blocks[-1], gap):
            (left, at), (right, other) = blocks[-2], blocks[-1]
            joined = left + right
            blocks[-2:] = [(joined, (at * len(left) + other * len(right)) / len(joined))]
    places = [0.0] * len(wanted)
    for members, centre in blocks:
        for rank, index in enumerate(members):
            places[index] = centre + (rank - (len(members) - 1) / 2) * gap
    return _within(places, order, gap, low, high)


def _overlap(below: tuple[list[int], float], above: tuple[list[int], float], gap: float) -> bool:
    return below[1] + (len(below[0]) + len(above[0])) / 2 * gap > above[1]


def _within(places: list[float], order: list[int], gap: float, low: float, high: float) -> list[float]:
    floor = low
    for index in order:
        places[index] = floor = max(places[index], floor)
        floor += gap
    roof = high
    for index in reversed(order):
        places[index] = roof = min(places[index], roof)
        roof -= gap
    return places


@dataclass(frozen=True)
class Hit:
    """A place of a chart that can be pointed at: its text, and where it lies in data coordinates."""

    text: str
    x: float
    y: float | None  # None: a whole column


def hits(chart: Chart) -> list[Hit]:
    """Columns of all curves that share an x, and single marks."""
    found = [
        Hit(line.tips[i] if line.tips else f"{line.label}: {shown(x)}, {shown(y)}", x, y)
        for line in chart.lines
        if line.points
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True))
    ]
    curves = [line for line in chart.lines if not line.points and not line.faint and line.label]
    if not found and curves:
        by_x: dict[float, list[str]] = {}
        for line in curves:
            x, y = thin(line.x, line.y)
            for at, value in zip(x or [], y or [], strict=True):
                by_x.setdefault(at, []).append(f"{line.label} {shown(value)}")
        for mark in chart.marks:
            if by_x:
                nearest = min(by_x, key=lambda at: abs(at - mark.x))
                by_x[nearest].append(mark.text)
        found = [Hit(f"{chart.x_label} {at:g}: {', '.join(by_x[at])}", at, None) for at in sorted(by_x)]
    return found
