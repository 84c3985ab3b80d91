"""Charts as PNG files, and as SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from rlhf_kl.report.plots.chart import Chart, draw, hits, label_ends
from rlhf_kl.report.plots.style import COLOURS, colour, house_style
from rlhf_kl.run.files import write_bytes_atomic

SVG_SIZE, SVG_TYPE = (340, 232), 10.5  # CSS pixels: a little narrower than a phone, so that type is not shrunk
PNG_WIDTH, PNG_DPI, PNG_TYPE = 6.4, 125, 11.5  # inches


def save_png(chart: Chart, path: Path) -> None:
    """One chart as a PNG, legible at the width of a phone."""
    save_sheet([chart], path, columns=1)


def save_sheet(charts: Sequence[Chart], path: Path, *, columns: int, heading: str = "", footer: str = "") -> None:
    """Charts side by side in one PNG under a heading."""
    from matplotlib.figure import Figure

    lines = -(-len(charts) // columns)
    height = (4.1 if columns == 1 else 2.75) * lines + (0.30 * (heading.count("\n") + 1) if heading else 0)
    size = PNG_TYPE if columns == 1 else PNG_TYPE * 0.95
    with house_style(size):
        figure = Figure(
            figsize=(PNG_WIDTH * (1 if columns == 1 else 1.2), height + 0.3 * bool(footer)), layout="constrained"
        )
        panels = figure.subplots(lines, columns, squeeze=False)
        for panel in panels.flat[len(charts) :]:
            panel.set_visible(False)
        if heading:
            figure.suptitle(heading, x=0.02, ha="left", fontsize=size * 1.12, fontweight="bold")
        if footer:
            figure.supxlabel(footer, x=0.02, ha="left", fontsize=size * 0.85, color=colour("muted"))
        for chart, panel in zip(charts, panels.flat, strict=False):
            draw(chart, panel, size)
        _reserve_labels(charts, panels, figure, size)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, _small_png(buffer))


def _small_png(picture: io.BytesIO) -> bytes:
    """The same with a palette of 256 colours: a third of the size, and nobody sees it."""
    from PIL import Image  # which matplotlib itself draws PNGs with

    buffer = io.BytesIO()
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _reserve_labels(charts: Sequence[Chart], panels: Any, figure: Any, size: float) -> None:
    """Lay out once with the labels' room, then put them where they do not overlap."""
    figure.canvas.draw()
    for chart, panel in zip(charts, panels.flat, strict=False):
        label_ends(chart, panel, size)


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element for a page: colours are CSS variables, places to point at have texts."""
    from matplotlib.figure import Figure

    width, height = SVG_SIZE
    with house_style(SVG_TYPE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(replace(chart, title="", subtitle=""), axes, SVG_TYPE)  # the page has its own headings
        figure.canvas.draw()
        label_ends(chart, axes, SVG_TYPE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        places = _hit_shapes(chart, axes, height)
    return _for_page(buffer.getvalue().decode(), chart, places)


def _hit_shapes(chart: Chart, axes: Any, height: float) -> str:
    found = hits(chart)
    box = axes.get_window_extent()
    pixels = [axes.transData.transform((hit.x, axes.get_ylim()[0] if hit.y is None else hit.y)) for hit in found]
    shapes = []
    columns = [float(pixel[0]) for hit, pixel in zip(found, pixels, strict=True) if hit.y is None]
    for i, (hit, (x, y)) in enumerate(zip(found, pixels, strict=True)):
        text = escape(hit.text)
        if hit.y is not None:
            shapes.append(
                f'<circle class="hit" cx="{x:.1f}" cy="{height - y:.1f}" r="8" data-tip="{text}">'
                f"<title>{text}</title></circle>"
            )
            continue
        left = (columns[i - 1] + x) / 2 if i else float(box.x0)
        right = (columns[i + 1] + x) / 2 if i + 1 < len(columns) else float(box.x1)
        shapes.append(
            f'<rect class="hit" x="{left:.1f}" y="{height - box.y1:.1f}" width="{max(1.0, right - left):.1f}" '
            f'height="{box.height:.1f}" data-tip="{text}"><title>{text}</title></rect>'
        )
    return "".join(shapes)


def _for_page(source: str, chart: Chart, places: str) -> str:
    body = source[source.index("<svg") :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    # Ids are counted from 1 in every picture; a page holds many.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.slug}-", body)
    names = {light: name for name, (light, _) in COLOURS.items()}
    body = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found[0], names), body)
    body = re.sub(r"font: [^;\"]*px [^;\"]*", lambda found: _type_size(found[0]), body)
    label = escape(f"{chart.title}: {', '.join(line.label for line in chart.lines if line.label)}")
    width, height = SVG_SIZE
    opening = (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    inner = body[body.index(">") + 1 : body.rindex("</svg>")]
    return f"{opening}{inner}<g>{places}</g></svg>"


def _variable(value: str, names: dict[str, str]) -> str:
    return f"var(--{names[value]})" if value in names else value


def _type_size(style: str) -> str:
    """Size and weight stay, the family is the page's."""
    size = re.search(r"([\d.]+px)", style)
    weight = "bold " if "bold" in style else ""
    return f"font: {weight}{size[1] if size else '10px'} sans-serif"
