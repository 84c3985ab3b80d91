"""How pictures are drawn: what a chart consists of, its colours, PNG files, and SVG for a page."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rlhf_kl.control.verdict import BAND
from rlhf_kl.run.folder import write_atomic
from rlhf_kl.text import format_number

# name: (on light, on dark). No two may be equal within a column. They can be told apart without colour vision.
COLOURS = {
    "page": ("#ffffff", "#15171a"),
    "ink": ("#1b1b1f", "#e8e8ec"),
    "muted": ("#5f6368", "#a3a7ae"),
    "grid": ("#dcdfe4", "#33373d"),
    "band": ("#dcefe2", "#1f3a2b"),
    "alert": ("#b3261e", "#ff8a80"),
    # One for each quantity, in every picture: hues after Okabe and Ito, darkened until they read as text on white.
    "kl": ("#0072b2", "#5db7f0"),
    "score": ("#007a5a", "#3ecf9f"),
    "gold": ("#9a6a00", "#e8b53b"),
    "perplexity": ("#8e4a9e", "#d19be0"),
    "beta": ("#c1440e", "#ff8d5c"),
    # An ordered scale, for variants and for the values of one setting.
    "s1": ("#440154", "#b58bd6"),
    "s2": ("#3f5bb5", "#8fa4f0"),
    "s3": ("#2a788e", "#5bb3cf"),
    "s4": ("#1f8a6d", "#3fd3a5"),
    "s5": ("#5c9a1a", "#95e36d"),
    "s6": ("#a08c00", "#ffe14d"),
    # More hues, for more variants than that: neighbours also differ in their dash.
    "s7": ("#cc6d00", "#ffa64d"),
    "s8": ("#9c3b1b", "#d9775a"),
    "s9": ("#b3164f", "#ff6f91"),
    "s10": ("#d055b0", "#ff5fd2"),
    "s11": ("#7d7184", "#d5cfdd"),
    "s12": ("#5b4a2f", "#b89b6a"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
HEX = re.compile(r"#[0-9a-f]{6}\b")
ORDERED = ("s1", "s2", "s3", "s4", "s5", "s6")
MANY = (*ORDERED, "s7", "s8", "s9", "s10", "s11", "s12")
UPDATE = "update"
LOG_FROM = 5.0  # a KL over this many times its target, or a beta that varies by this factor, has a log axis
MOST_POINTS = 400  # of a line; a longer line is drawn as means of segments
FEW_POINTS = 12  # a line with fewer points has marks
APART = 1.4  # factor between two values on a logarithmic axis from which both have room for a label
SVG_SIZE, SVG_TYPE = (340, 232), 10.5  # CSS pixels: a little narrower than a phone, so that the text keeps its size
PNG_WIDTH, PNG_DPI, PNG_TYPE = 6.4, 125, 11.5  # inches
MOST_TYPE = 1.4  # of a sheet, over that of a single chart
TITLE = 0.65  # width of a letter of a title, over the size of the type
SHORT = 6  # letters of names of which a legend has four in a line, else three

Axes = Any  # matplotlib's, which has no annotations


class Line(NamedTuple):
    """A curve, with the band around it; or single points, if `dash` is "none"."""

    label: str
    tint: str  # a name of `COLOURS`
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dash: Any = "solid"
    marker: str | None = None  # default: a dot where there are few points


@dataclass(frozen=True)
class Chart:
    """A picture that can be drawn in several sizes, and the words around it."""

    slug: str
    title: str
    ylabel: str
    lines: Sequence[Line]
    caption: str = ""
    subtitle: str = ""
    xlabel: str = UPDATE
    log: str = ""  # axes that are logarithmic: "x", "y" or "xy"
    ylim: tuple[float, float] | None = None
    target: float | None = None  # a KL, drawn with the band around it
    ceiling: float | None = None


def marks(label: str, tint: str, x: Sequence[float], y: Sequence[float], marker: str = "o") -> Line:
    """Single points."""
    return Line(label, tint, x, y, dash="none", marker=marker)


def log_if_wide(low: float, high: float) -> str:
    """The `log` of a chart whose quantity spans more than a factor of five."""
    return "y" if 0 < LOG_FROM * low < high else ""


def with_values(charts: Iterable[Chart | None]) -> list[Chart]:
    """The charts that have anything to draw."""
    return [chart for chart in charts if chart is not None and any(line.x for line in chart.lines)]


def css() -> str:
    """The colours as CSS variables, for light and dark; paper is light."""
    light, dark = ("".join(f"--{name}:{value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def thin(values: Sequence[float]) -> list[float]:
    """The values as means of at most 400 segments of equal length."""
    size = max(1, math.ceil(len(values) / MOST_POINTS))
    return [fmean(values[i : i + size]) for i in range(0, len(values), size)]


# ---- files and pages


def save_sheet(
    charts: Sequence[Chart], path: Path, *, columns: int | None = None, heading: str = "", dark: bool = False
) -> None:
    """Charts side by side under a heading, in type that is legible at the width of a phone where the titles allow it.

    The format is that of the path's suffix. columns: default two or three, as they fill their rows.
    """
    columns, colours = columns or min(len(charts), 2 if len(charts) in (2, 4) else 3), DARK if dark else LIGHT
    rows = -(-len(charts) // columns)
    width = PNG_WIDTH * (0.6 + 0.3 * columns) if columns > 1 else PNG_WIDTH
    room = 72 * ((width - 0.5) / columns - 0.1)
    fits = room / max(1.0, *map(_width, charts), 0.65 * len(heading) / columns)
    size = PNG_TYPE * min(max(fits / PNG_TYPE, 0.95), MOST_TYPE) if columns > 1 else PNG_TYPE
    height = (4.1, 2.75, 2.5)[min(columns, 3) - 1] * rows * max(1.0, size / PNG_TYPE) ** 0.5 + 0.3 * bool(heading)
    with _picture_style(size, colours):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        if heading:
            figure.suptitle(heading, fontsize=size * 1.12, fontweight="bold", x=0.02, ha="left")
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel in panels[len(charts) :]:
            panel.set_visible(False)
        same_x, same_y = (len(set(names)) == 1 for names in zip(*((c.xlabel, c.ylabel) for c in charts), strict=True))
        for i, (chart, panel) in enumerate(zip(charts, panels, strict=False)):
            pad = 6 + 1.5 * size * _draw(chart, panel, colours)
            if legend := panel.get_legend():
                legend.set_in_layout(False)  # a wide one does not push the panels apart
            if same_x and i + columns < len(charts):
                panel.set_xlabel("")
            if same_y and i % columns:
                panel.set_ylabel("")
            title = textwrap.fill(chart.title, int(room / (TITLE * size) + 0.01))
            panel.set_title(f"{title}\n" if chart.subtitle else title, pad=pad, loc="left")
            panel.annotate(
                chart.subtitle, (0, 1), xytext=(0, pad), xycoords="axes fraction", textcoords="offset points",
                fontsize=size * 0.9, color=colours["muted"], in_layout=False,
            )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix[1:], dpi=PNG_DPI)
    write_atomic(path, buffer.getvalue())


def _width(chart: Chart) -> float:
    """About the width of its title, subtitle and legend, in its type's size."""
    names = [line.label for line in chart.lines if line.x and line.label]
    names += [name for name, level in (("target", chart.target), ("ceiling", chart.ceiling)) if level is not None]
    legend, columns = 0.0, _legend_columns(names)
    for i in range(columns):  # as matplotlib fills them: the first ones have one name more
        first, length = i * (len(names) // columns) + min(i, len(names) % columns), -(-(len(names) - i) // columns)
        legend += 2.8 + 0.54 * max(map(len, names[first : first + length]), default=0)
    return max(TITLE * len(chart.title), 0.52 * len(chart.subtitle), legend if len(names) > 1 else 0.0)


def _legend_columns(names: Sequence[str]) -> int:
    return min(len(names), 4 if max(map(len, names)) <= SHORT else 3) if names else 1


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element without title, whose colours are CSS variables.

    matplotlib writes each as the light one, and only into `style`; text stays as it is. A page holds many charts, which
    share ids: matplotlib makes those that are referred to from what they stand for.
    """
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _picture_style(SVG_TYPE, LIGHT):
        figure = Figure(figsize=(SVG_SIZE[0] / 72, SVG_SIZE[1] / 72), dpi=72, layout="constrained")
        _draw(chart, figure.subplots(), LIGHT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    variables = {light: f"var(--{name})" for name, light in LIGHT.items()}
    for node in root.iter():
        node.tag = _plain(node.tag)  # a page knows no namespaces
        node.attrib = {_plain(name): value for name, value in node.attrib.items()}
        if style := node.get("style"):
            node.set("style", HEX.sub(lambda found: variables[found[0]], style))
    ends = [f"{line.label} {format_number(line.y[0])} to {format_number(line.y[-1])}" for line in chart.lines if line.x]
    root.attrib |= {"class": "chart", "role": "img", "aria-label": f"{chart.title}: {', '.join(ends)}"}
    return ElementTree.tostring(root, "unicode")


def _plain(name: str) -> str:
    """A name of XML without its namespace."""
    return name.rpartition("}")[2]


def _draw(chart: Chart, axes: Axes, colours: Mapping[str, str]) -> int:
    """The chart with plain ticks, and above it a legend where it has several names; returns the legend's lines."""
    scales = {f"{axis}scale": "log" for axis in chart.log}
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel, **scales)
    if chart.target is not None:
        edges = (1 - BAND) * chart.target, (1 + BAND) * chart.target
        axes.axhspan(*edges, color=colours["band"], zorder=0.5, linewidth=0)
    for label, tint, level in (("target", "muted", chart.target), ("ceiling", "alert", chart.ceiling)):
        if level is not None:
            axes.axhline(level, color=colours[tint], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.2, label=label)
    for line in (line for line in chart.lines if line.x):
        x, y, low, high = map(thin, (line.x, line.y, line.low, line.high))
        marker = line.marker if line.marker is not None else "o" if len(x) < FEW_POINTS else ""
        if low and line.marker:
            errors = [[m - a for m, a in zip(y, low, strict=True)], [b - m for m, b in zip(y, high, strict=True)]]
            axes.errorbar(x, y, errors, fmt="none", color=colours[line.tint], elinewidth=1.0, capsize=2.5)
        elif low:
            axes.fill_between(x, low, high, color=colours[line.tint], alpha=0.13, linewidth=0, zorder=1.5)
        size = 5.5 if line.dash == "none" else 3.2
        axes.plot(x, y, color=colours[line.tint], ls=line.dash, marker=marker, markersize=size, label=line.label)
    if chart.ylim is not None:
        axes.set_ylim(chart.ylim)
    elif "y" not in chart.log:
        axes.margins(y=0.08)
    if chart.xlabel == UPDATE:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    for name in chart.log:
        _plain_log_ticks(axes.xaxis if name == "x" else axes.yaxis)
    settings = sorted({x for line in chart.lines for x in line.x if line.marker})
    if "x" in chart.log and 1 < len(settings) < FEW_POINTS and min(b / a for a, b in pairwise(settings)) > APART:
        axes.set_xticks(settings)  # each value that was tried
    names = axes.get_legend_handles_labels()[1]
    if len(names) < 2:  # the title says it
        return 0
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=_legend_columns(names), frameon=False,
        borderaxespad=0.1, handlelength=1.6, columnspacing=1.0, handletextpad=0.5,
    )  # fmt: skip
    return -(-len(names) // _legend_columns(names))


def _plain_log_ticks(axis: Axes) -> None:
    """1, 2 and 5 of each decade where there are few decades, as plain numbers."""
    axis.set_minor_locator(NullLocator())
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter("{x:g}")


@contextmanager
def _picture_style(size: float, colours: Mapping[str, str]) -> Iterator[None]:
    """matplotlib's settings while a picture is drawn; `size` of the type in points."""
    muted, grid, small = colours["muted"], colours["grid"], size * 0.9
    settings = {
        "font.family": "DejaVu Sans", "font.size": size, "legend.fontsize": small, "lines.linewidth": 1.4,
        "axes.titlesize": size * 1.08, "axes.titlelocation": "left", "axes.titleweight": "bold",
        "axes.labelsize": size * 0.95, "axes.labelcolor": muted, "axes.edgecolor": muted, "axes.linewidth": 0.7,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": grid, "grid.linewidth": 0.7,
        "xtick.color": muted, "xtick.labelsize": small, "xtick.major.size": 3,
        "ytick.color": muted, "ytick.labelsize": small, "ytick.major.size": 0,
        "figure.facecolor": colours["page"], "axes.facecolor": colours["page"],
        "text.color": colours["ink"], "text.parse_math": False,  # names are text, whatever they hold
        "svg.fonttype": "none", "svg.hashsalt": "rlhf-kl",
    }  # fmt: skip
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")  # a run's name may be in any script
        yield
