"""Charts as PNG files, and as SVG with the colours of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from rlhf_kl.report.plots.chart import LEGEND_COLUMNS, Axes, Chart
from rlhf_kl.report.plots.style import COLOURS, colour, picture_style
from rlhf_kl.run.files import write_bytes_atomic

SVG_SIZE, SVG_TYPE = (340, 232), 10.5  # CSS pixels: a little narrower than a phone, so that the text keeps its size
PNG_WIDTH, PNG_DPI, PNG_TYPE = 6.4, 125, 11.5  # inches
LEGEND_LINE, LABEL_GAP = 1.45, 1.15  # of the type size: height of a line, distance of two labels


def save_png(chart: Chart, path: Path) -> None:
    """One chart as a PNG, legible at the width of a phone."""
    save_sheet([chart], path, columns=1)


def save_sheet(charts: Sequence[Chart], path: Path, *, columns: int, heading: str = "", footer: str = "") -> None:
    """Charts side by side in one PNG under a heading."""
    lines = -(-len(charts) // columns)
    height = (4.1, 2.75, 2.5)[min(columns, 3) - 1] * lines + (0.30 * (heading.count("\n") + 1) if heading else 0)
    width, size = (PNG_WIDTH, PNG_TYPE) if columns == 1 else (PNG_WIDTH * (0.6 + 0.3 * columns), PNG_TYPE * 0.95)
    with picture_style(size):
        figure = Figure(figsize=(width, height + 0.3 * bool(footer)), layout="constrained")
        panels = list(figure.subplots(lines, columns, squeeze=False).flat)
        for panel in panels[len(charts) :]:
            panel.set_visible(False)
        if heading:
            figure.suptitle(heading, x=0.02, ha="left", fontsize=size * 1.12, fontweight="bold")
        if footer:
            figure.supxlabel(footer, x=0.02, ha="left", fontsize=size * 0.85, color=colour("muted"))
        for chart, panel in zip(charts, panels, strict=False):
            _draw(chart, panel)
            _add_title(chart, panel, size)
        figure.canvas.draw()
        for panel in panels[: len(charts)]:
            _label_lines(panel, size)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, _small_png(buffer))


def _small_png(picture: io.BytesIO) -> bytes:
    """The picture with a palette of 256 colours: a third of the size, without a visible difference."""
    buffer = io.BytesIO()
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element, without title: the page has the headings."""
    width, height = SVG_SIZE
    with picture_style(SVG_TYPE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        _draw(chart, axes)
        figure.canvas.draw()
        _label_lines(axes, SVG_TYPE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        shapes = _hover_shapes(chart, axes, height)
    return _for_page(buffer.getvalue().decode(), chart, shapes)


# ---- drawing


def _draw(chart: Chart, axes: Axes) -> None:
    """The chart with plain ticks and, on a linear axis without limits of its own, some room above and below."""
    chart.draw(axes)
    if axes.get_yscale() == "linear" and axes.get_autoscaley_on():
        axes.margins(y=0.08)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            _plain_log_ticks(axis)
    if axes.get_xscale() == "linear" and all(
        float(x).is_integer() for line in axes.get_lines() for x in line.get_xdata()
    ):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))


def _plain_log_ticks(axis: Axes) -> None:
    """1, 2 and 5 of each decade where there are few decades, as plain numbers; none where a chart set its own."""
    if isinstance(axis.get_major_locator(), FixedLocator):
        axis.set_minor_locator(NullLocator())
        return
    low, high = sorted(axis.get_view_interval())
    if low <= 0:
        return
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _add_title(chart: Chart, axes: Axes, size: float) -> None:
    """Title and subtitle, above the legend where there is one."""
    legend = axes.get_legend()
    names = len(legend.get_texts()) if legend else 0
    pad = 8 + LEGEND_LINE * size * -(-names // LEGEND_COLUMNS)
    axes.set_title(f"{chart.title}\n" if chart.subtitle else chart.title, pad=pad, loc="left")
    axes.annotate(
        chart.subtitle, (0, 1), xytext=(0, pad), xycoords="axes fraction", textcoords="offset points",
        fontsize=size * 0.9, color=colour("muted"), va="bottom",
    )  # fmt: skip


def _label_lines(axes: Axes, size: float) -> None:
    """Names at the right ends of the lines, moved apart if they would overlap; none if there is a legend.

    Call it after the layout: it compares heights in points.
    """
    if axes.get_legend():
        return
    scale, box = 72.0 / axes.figure.dpi, axes.get_window_extent()
    lines, heights = [], []
    for line in axes.get_lines():
        drawn = [y for y in line.get_ydata() if not math.isnan(y)]
        if drawn and line.get_label() and not line.get_label().startswith("_"):
            height = float(axes.transData.transform((axes.get_xlim()[1], drawn[-1]))[1])
            lines.append(line)
            heights.append(min(max(height, box.y0), box.y1) * scale)
    bottom, top = box.y0 * scale, box.y1 * scale
    for line, place in zip(lines, spread(heights, LABEL_GAP * size, bottom, top), strict=True):
        axes.annotate(
            line.get_label(), (1, (place - bottom) / (top - bottom)), xytext=(5, 0), xycoords="axes fraction",
            textcoords="offset points", color=line.get_color(), fontsize=size * 0.92, va="center",
            annotation_clip=False,
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to those wanted, in the same order, at least `gap` apart, within [low, high] where all fit.

    Nearest in squares: less `gap` times their rank, places are an isotonic regression (its min-max formula).
    """
    count = len(wanted)
    order = sorted(range(count), key=wanted.__getitem__)
    bare = [wanted[index] - rank * gap for rank, index in enumerate(order)]
    places = [0.0] * count
    for rank, index in enumerate(order):
        level = max(min(fmean(bare[i : j + 1]) for j in range(rank, count)) for i in range(rank + 1))
        places[index] = min(max(level, low), high - (count - 1) * gap) + rank * gap
    return places


# ---- for a page


def _hover_shapes(chart: Chart, axes: Axes, height: float) -> str:
    """Shapes that react to the pointer: a circle for a point, a rectangle for a column."""
    box = axes.get_window_extent()
    pixels = [axes.transData.transform((p.x, axes.get_ylim()[0] if p.y is None else p.y)) for p in chart.places]
    shapes = []
    for i, (place, (x, y)) in enumerate(zip(chart.places, pixels, strict=True)):
        text = escape(place.text)
        if place.y is not None:
            shape = f'circle class="hit" cx="{x:.1f}" cy="{height - y:.1f}" r="8"'
        else:
            left = (pixels[i - 1][0] + x) / 2 if i else box.x0
            right = (pixels[i + 1][0] + x) / 2 if i + 1 < len(pixels) else box.x1
            shape = f'rect class="hit" x="{left:.1f}" y="{height - box.y1:.1f}" '
            shape += f'width="{max(1.0, right - left):.1f}" height="{box.height:.1f}"'
        shapes.append(f'<{shape} data-tip="{text}"><title>{text}</title></{shape.partition(" ")[0]}>')
    return "".join(shapes)


def _for_page(source: str, chart: Chart, shapes: str) -> str:
    """The SVG with ids of its own and colours as CSS variables."""
    body = source[source.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    # Ids are counted from 1 in every picture; a page holds many.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.slug}-", body)
    variables = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    body = re.sub(r"#[0-9a-f]{6}\b", lambda match: variables.get(match[0], match[0]), body)
    width, height = SVG_SIZE
    opening = (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    inner = body[body.index(">") + 1 : body.rindex("</svg>")]
    return f"{opening}{inner}<g>{shapes}</g></svg>"
