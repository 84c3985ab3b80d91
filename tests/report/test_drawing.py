"""Pictures as files and inside a page."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from matplotlib.image import imread

from rlhf_kl.report.charts import Style, variant_styles
from rlhf_kl.report.drawing import COLOURS, MANY, Chart, Line, css, marks, save_sheet, svg, thin

NAME = "<script>$x_1$ 字 #0072b2"  # a colour in a name is text
LINES = [  # a log axis cannot show 0
    Line(NAME, "score", [1.0, 2.0, 3.0], [0.0, 0.5, 0.2], [0.0, 0.4, 0.1], [0.1, 0.6, 0.3]),
    Line("other", "s3", [1.0, 2.0], [0.1, 0.2], dash=(0, (5, 2))),
    marks("end", "kl", [3.0], [0.4]),
]
CHART = Chart("kl", "A $title$ <b>", "KL", LINES, subtitle="and more", log="y", target=0.2)


def test_svg_is_xml_that_takes_its_colours_from_the_page() -> None:
    text = svg(CHART)
    root = ElementTree.fromstring(text)
    assert "<script>" not in text
    texts = "".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    assert NAME in texts  # names are text: neither markup nor mathematics
    assert {"var(--score)", "var(--s3)", "var(--kl)", "var(--band)"} <= set(re.findall(r"var\(--\w+\)", text))
    others = {name: value for node in root.iter() for name, value in node.attrib.items() if "#" in value}
    assert others.keys() <= {"href", "clip-path", "aria-label"}  # references, and the name as it is
    assert root.get("aria-label") == f"A $title$ <b>: {NAME} 0 to 0.200, other 0.100 to 0.200, end 0.400 to 0.400"
    assert svg(CHART) == text


def test_a_page_has_each_colour_for_light_and_for_dark() -> None:
    light, _, dark = css().partition("prefers-color-scheme:dark")
    for name, (on_light, on_dark) in COLOURS.items():
        assert f"--{name}:{on_light};" in light
        assert f"--{name}:{on_dark};" in dark


def lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour, in which equal distances look alike."""
    r, g, b = (((c + 0.055) / 1.055) ** 2.4 for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    xyz = (0.434 * r + 0.376 * g + 0.19 * b, 0.213 * r + 0.715 * g + 0.072 * b, 0.018 * r + 0.109 * g + 0.873 * b)
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_up_to_twelve_variants_have_a_colour_each() -> None:
    """Of more, those of one colour differ in dash and marker; next to each other in the legend dashes differ."""

    def styles(count: int) -> list[Style]:
        variants: Any = SimpleNamespace(variants=[SimpleNamespace(name=str(i)) for i in range(count)])
        return list(variant_styles(variants).values())

    for count in range(1, 13):
        assert len({style.tint for style in styles(count)}) == count
    assert {style.dash for style in styles(6)} == {"solid"}
    assert all(a.dash != b.dash for a, b in pairwise(styles(12)))
    assert len({(style.tint, str(style.dash)) for style in styles(24)}) == 24
    assert len({(style.tint, style.marker) for style in styles(24)}) == 24
    for page in (0, 1):
        colours = [lab(COLOURS[name][page]) for name in MANY]
        assert min(dist(a, b) for a, b in combinations(colours, 2)) > 20  # 2 can just be told apart, side by side


def test_every_value_that_was_tried_has_its_label() -> None:
    targets = [0.02, 0.075, 0.15]
    chart = Chart("targets", "Score", "score", [Line("score", "score", targets, [1.0, 2.0, 3.0], marker="o")], log="x")
    texts = {
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg(chart)).iter() if "text" in node.tag
    }
    assert {"0.02", "0.075", "0.15"} <= texts


def test_pictures_of_a_page_refer_to_ids_that_stand_for_the_same_in_each() -> None:
    """A browser takes the first one of the page."""
    other = replace(CHART, log="", lines=[*LINES, marks("more", "gold", [1.0], [0.1], "^")], target=None)
    meanings: dict[str, set[str]] = {}
    for chart in (CHART, other):
        root = ElementTree.fromstring(svg(chart))
        defined = {node.get("id"): ElementTree.tostring(node).decode().strip() for node in root.iter()}
        referred = re.findall(r'(?:href="#|url\(#)([^")]+)', svg(chart))
        assert len(set(referred)) > 3
        for name in referred:
            meanings.setdefault(name, set()).add(defined[name])
    assert all(len(each) == 1 for each in meanings.values())


def test_png_files(tmp_path: Path) -> None:
    save_sheet([CHART], tmp_path / "new" / "one.png")
    save_sheet([CHART, CHART, CHART], tmp_path / "sheet.png", columns=2, heading="Heading")
    for name in ("new/one.png", "sheet.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert 700 < int.from_bytes(data[16:20], "big") < 1100  # pixels wide
        assert len(data) < 200_000


def sizes(file: Path) -> list[float]:
    """Of the text of an SVG file, in points."""
    return [float(size) for size in re.findall(r"font-size: ([\d.]+)px", file.read_text(encoding="utf-8"))]


def test_a_sheet_has_one_label_for_an_axis_and_type_as_large_as_its_titles_allow(tmp_path: Path) -> None:
    """Shown at the width of a phone, type of the usual size was 7 pixels high."""
    short = Chart("a", "held", "KL / target", [Line("", "kl", [1.0, 2.0], [0.1, 0.2])])
    long = replace(short, title="a title of a chart that has forty letters")
    for name, charts in {
        "short": [short] * 4,
        "long": [long] * 4,
        "other": [short, replace(short, ylabel="b")],
    }.items():
        save_sheet(charts, tmp_path / f"{name}.svg")
    texts = {name: (tmp_path / f"{name}.svg").read_text(encoding="utf-8") for name in ("short", "other")}
    assert texts["short"].count(">KL / target<") == texts["short"].count(">update<") == 2
    assert texts["other"].count(">KL / target<") == texts["other"].count(">b<") == 1
    assert max(sizes(tmp_path / "short.svg")) > 1.25 * max(sizes(tmp_path / "long.svg"))


def test_a_title_that_is_wider_than_its_chart_is_broken(tmp_path: Path) -> None:
    """It was written over the title beside it."""
    names = ("controller_of_a_long_name: short, 22%", "static: 0.72x the target", "adaptive: held")
    charts = [Chart(name, name, "KL", [Line("", "kl", [1.0, 2.0], [0.1, 0.2])]) for name in names]
    save_sheet(charts, tmp_path / "three.svg")
    text = (tmp_path / "three.svg").read_text(encoding="utf-8")
    assert [f">{name}<" in text for name in names] == [False, True, True]
    assert re.search(">controller_of_a_long_name:.*<.*>(short, )?22%<", text, re.DOTALL)


def test_a_picture_for_dark_pages_is_dark(tmp_path: Path) -> None:
    save_sheet([CHART], tmp_path / "light.png")
    save_sheet([CHART], tmp_path / "dark.png", dark=True)
    corners = [imread(tmp_path / f"{name}.png")[0, 0, :3].mean() for name in ("light", "dark")]
    assert corners[0] == 1.0
    assert corners[1] < 0.1


def test_long_lines_become_means_of_segments() -> None:
    values = [float(i) for i in range(1000)]
    assert len(thin(values)) == 334
    assert thin(values)[:2] == [1.0, 4.0]  # of 0, 1, 2 and of 3, 4, 5
    assert thin(values[:400]) == values[:400]
