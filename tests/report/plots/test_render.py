from __future__ import annotations

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

from rlhf_kl.report.plots.chart import Chart, Level, Line, Mark
from rlhf_kl.report.plots.render import save_png, save_sheet, svg
from rlhf_kl.report.plots.style import COLOURS

CHART = Chart(
    "kl",
    "A $title$ <b>",
    "update",
    "nats",
    [
        Line("<script>$x_1$ 字", [1.0, 2.0, 3.0], [0.0, 0.5, 0.2], "c2", low=[0.0, 0.4, 0.1], high=[0.1, 0.6, 0.3]),
        Line("other", [1.0, 2.0], [0.1, 0.2], "s3", dash=(0, (5, 2))),
    ],
    band=(0.1, 0.3),
    levels=[Level(0.2, "target", "c3")],
    marks=[Mark(2.0, "kl-spike")],
    log_y=True,
)


def test_svg_is_whole_xml_that_takes_its_colours_from_the_page() -> None:
    text = svg(CHART)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "<script>" not in text
    texts = "".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    assert "<script>$x_1$ 字" in texts  # names are text: neither markup nor mathematics
    assert "target" in texts
    assert {"var(--c2)", "var(--s3)", "var(--c3)", "var(--band)", "var(--alert)"} <= set(
        re.findall(r"var\(--\w+\)", text)
    )
    own = {light for light, _ in COLOURS.values()}
    assert not own & set(re.findall(r"#[0-9a-f]{6}\b", text))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("kl-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    tips = [node.get("data-tip") for node in root.iter() if node.get("data-tip")]
    assert tips[1] == "update 2: <script>$x_1$ 字 0.500, other 0.200, kl-spike"


def test_png_files_at_the_width_of_a_page(tmp_path: Path) -> None:
    save_png(CHART, tmp_path / "new" / "one.png")
    save_sheet([CHART, CHART, CHART], tmp_path / "sheet.png", columns=2, heading="Heading", footer="note")
    for name in ("new/one.png", "sheet.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert 700 < width < 1100
        assert height > 400
        assert len(data) < 150_000


def test_the_same_chart_is_the_same_text() -> None:
    assert svg(CHART) == svg(CHART)
