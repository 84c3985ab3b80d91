"""Marked tables of README, guide and scripts/results show numbers of the measurements in scripts/results."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
RECORD = RESULTS / "README.md"
PAGES = [ROOT / "README.md", RECORD, *sorted((ROOT / "rlhf_kl" / "guide").glob("*.md"))]
MARK = re.compile(r"<!-- figures: ([\w ]+) -->\n\n?((?:\|.*\n)+)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
KEYS = {"what", "command", "commit", "date", "machine", "seeds", "figures"}


def marked(text: str) -> list[tuple[str, list[list[str]]]]:
    """Name and rows of every marked table, without its head."""
    tables = []
    for name, table in MARK.findall(text):
        rows = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        tables.append((name, rows))
    return tables


def numbers(found: Any) -> list[float]:
    """Every number in a part of a result, but those of single seeds: no table shows them."""
    if isinstance(found, dict):
        return [number for name, part in found.items() if name != "seeds" for number in numbers(part)]
    if isinstance(found, list):
        return [number for part in found for number in numbers(part)]
    return [float(found)] if isinstance(found, int | float) and not isinstance(found, bool) else []


def wrong_numbers(rows: list[list[str]], figures: dict[str, Any]) -> list[str]:
    """Numbers that stand in no result of their row, whose name ends in the row's first cell."""
    wrong = []
    for name, *cells in rows:
        entries = [entry for key, entry in figures.items() if key == name or key.endswith(f"-{name}")]
        known = numbers(entries)
        for text in NUMBER.findall(" ".join(cells)):
            digits = len(text.partition(".")[2])
            value = float(text.replace(",", ""))
            if not any(abs(value - figure) <= 0.5000001 * 10**-digits for figure in known):
                wrong.append(f"{name}: {text}")
    return wrong


TABLES = [(page, name, rows) for page in PAGES for name, rows in marked(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("page", "name", "rows"), TABLES, ids=[f"{page.parent.name}-{page.stem}-{name}" for page, name, _ in TABLES]
)
def test_each_number_of_a_marked_table_was_measured(page: Path, name: str, rows: list[list[str]]) -> None:
    found = {each: json.loads((RESULTS / f"{each}.json").read_text(encoding="utf-8")) for each in name.split()}
    figures = {f"{each}-{key}": entry for each, result in found.items() for key, entry in result["figures"].items()}
    assert rows
    assert wrong_numbers(rows, figures) == []


def test_the_differences_that_the_record_names_are_those_that_many_tests_leave() -> None:
    """Three of the 18 would be significant, each by itself."""
    script = runpy.run_path(str(RESULTS.parent / "differences.py"))
    every = script["differences"](json.loads((RESULTS / "advantages.json").read_text(encoding="utf-8"))["figures"])
    page = " ".join(RECORD.read_text(encoding="utf-8").split())
    assert len(every) == 18
    assert script["sentence"](every) in page
    assert "significant" not in page.replace(script["sentence"](every), "")


def test_the_record_says_what_was_measured() -> None:
    found = {file.stem: json.loads(file.read_text(encoding="utf-8"))["figures"] for file in RESULTS.glob("*.json")}
    runs = {name: [run["tail_error"] for run in row.values()] for name, row in found["stress"].items()}
    reached = {name: errors for name, errors in runs.items() if name != "stress-rate-1e-5-linear"}
    every = [error for errors in reached.values() for error in errors]
    top, *others = sorted(reached, key=lambda name: -max(reached[name]))
    assert top == "stress-target-1"
    away = f"{fmean(every):.0%} away on average; at worst {max(every):.0%}, where the score was at its top, and "
    away += f"{max(max(reached[name]) for name in others):.0%} elsewhere"
    words = [
        f"Of {sum(map(len, runs.values()))} runs",
        f"{len(every)} could reach their target",
        away.replace("%", " %"),
    ]
    text = " ".join(RECORD.read_text(encoding="utf-8").split())
    assert [each for each in words if each not in text] == []


def test_holms_correction_by_hand() -> None:
    holm = runpy.run_path(str(RESULTS.parent / "differences.py"))["holm"]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_says_how_it_was_made(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result.keys() == KEYS
    assert all(result[key] for key in KEYS)
    assert not re.search(r"(?<![\w.])/(?!proc)[a-z]+/", result["command"])  # no path of a machine
