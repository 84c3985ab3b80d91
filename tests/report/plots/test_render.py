from __future__ import annotations

import random
import re
import struct
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rlhf_kl.report.plots.chart import Axes, Chart, columns, plot_line, plot_target
from rlhf_kl.report.plots.render import save_png, save_sheet, spread, svg
from rlhf_kl.report.plots.style import COLOURS

NAME = "<script>$x_1$ 字"
CURVES = [(NAME, [1.0, 2.0, 3.0], [0.0, 0.5, 0.2]), ("other", [1.0, 2.0], [0.1, 0.2])]


def draw(axes: Axes) -> None:
    axes.set(xlabel="update", yscale="log")
    plot_target(axes, 0.2)
    (name, *first), (other, *second) = CURVES
    plot_line(axes, *first, "c2", [0.0, 0.4, 0.1], [0.1, 0.6, 0.3], label=name)
    plot_line(axes, *second, "s3", linestyle=(0, (5, 2)), label=other)


CHART = Chart("kl", "A $title$ <b>", draw, columns("update", CURVES, [(2.0, "kl-spike")]), subtitle="and more")


def test_svg_is_whole_xml_that_takes_its_colours_from_the_page() -> None:
    text = svg(CHART)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "<script>" not in text
    texts = "".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    assert NAME in texts  # names are text: neither markup nor mathematics
    assert "target" in texts
    assert {"var(--c2)", "var(--s3)", "var(--c3)", "var(--band)"} <= set(re.findall(r"var\(--\w+\)", text))
    own = {light for light, _ in COLOURS.values()}
    assert not own & set(re.findall(r"#[0-9a-f]{6}\b", text))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("kl-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    tips = [node.get("data-tip") for node in root.iter() if node.get("data-tip")]
    assert tips[1] == f"update 2: {NAME} 0.500, other 0.200, kl-spike"
    assert svg(CHART) == text


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


def test_labels_keep_their_order_and_their_distance() -> None:
    rng = random.Random(1)
    for _ in range(200):
        wanted = [rng.uniform(0, 100) for _ in range(rng.randint(1, 8))]
        places = spread(wanted, 10.0, 0.0, 100.0)
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert all(places[b] - places[a] >= 10.0 - 1e-9 for a, b in pairwise(order))
        assert min(places) >= -1e-9
        assert max(places) <= 100.0 + 1e-9


def test_labels_stay_as_near_as_they_can() -> None:
    assert spread([50.0, 10.0, 30.0], 10.0, 0.0, 100.0) == pytest.approx([50.0, 10.0, 30.0])
    assert spread([50.0, 50.0], 10.0, 0.0, 100.0) == pytest.approx([45.0, 55.0])
    assert spread([48.0, 50.0, 52.0, 90.0], 10.0, 0.0, 100.0) == pytest.approx([40.0, 50.0, 60.0, 90.0])
    assert spread([1.0, 2.0], 10.0, 0.0, 100.0) == pytest.approx([0.0, 10.0])
    assert spread([], 10.0, 0.0, 100.0) == []
