"""Sentences, from figures that leave only one of them true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.verdict import figures_table, judge, text_table

Grid = Callable[..., Comparison]

TWO = {
    "adaptive-0.1x": ("adaptive", 0.02, 0.1),
    "adaptive-1x": ("adaptive", 0.2, 0.1),
    "static-0.1x": ("fixed", 0.02, 0.4),
    "static-1x": ("fixed", 0.2, 0.1),
    "static-10x": ("fixed", 2.0, 0.01),
}


def test_a_constant_beta_that_lands_in_the_band_has_held_nothing(grid: Grid) -> None:
    lines = judge(grid(TWO))
    assert len(lines) == 4
    assert lines[0] == (
        "adaptive held the target of 0.1 nats per token (off by 0% to 4%); static ended at 0.10x to 4.1x the target."
    )
    assert lines[1].startswith("Score at equal KL: no difference between adaptive and static (")
    assert "95 % interval" in lines[1]
    assert lines[2].startswith("True score at equal KL: ")
    assert lines[3].startswith("Cost in held-out perplexity: adaptive +3%; static +0% to +1")


def test_without_gold_nothing_is_said_of_it(write_run: Callable[..., Path], metrics_rows: Callable[..., Any]) -> None:
    paths = []
    for target in (0.05, 0.1, 0.2):
        for seed in (0, 1):
            rows = metrics_rows([target] * 30, target=target, gold=False)
            paths.append(
                write_run(f"t{target}-s{seed}", rows, config={"run": {"seed": seed}, "kl": {"target": target}})
            )
    comparison = read_comparison(paths)
    assert judge(comparison) == [
        "From a target of 0.05 to 0.2 nats per token: score 2.41 -> 3.83, held-out perplexity 3.05 -> 3.20. Take the "
        "highest whose texts are still good.",
        "All 3 variants with a target held their targets (off by 0%).",
    ]
    assert figures_table(comparison)[0] == ["variant", "target", "KL", "score", "perplexity"]


@pytest.mark.parametrize(
    ("kls", "words"),
    [
        ([0.1] * 45 + [0.13] * 10 + [0.1] * 5, "run (1 of 2 seeds) missed it (off by 10%)"),
        ([0.03] * 40 + [0.1] * 20, "run (1 of 2 seeds) reached it late (off by 0% since)"),
        ([0.1] * 10, "too short to say: run (1 of 2 seeds) (under 15 updates, or the KL still rises)"),
    ],
)
def test_seeds_are_counted_by_their_verdict(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], kls: list[float], words: str
) -> None:
    """Means may pass where one seed does not."""
    paths = [
        write_run(f"run-s{seed}", metrics_rows(each), config={"run": {"seed": seed}})
        for seed, each in enumerate(([0.1] * 60, kls))
    ]
    comparison = read_comparison(paths)
    assert figures_table(comparison)[1][0][1] == "held 1/2"
    assert words in judge(comparison)[0]


@pytest.mark.parametrize(("shift", "word"), [(0.5, "higher than"), (-0.5, "lower than")])
def test_a_true_difference(grid: Grid, shift: float, word: str) -> None:
    lines = judge(grid(TWO, extra={"adaptive-0.1x": shift, "adaptive-1x": shift * 1.2}))
    assert any(f"Score at equal KL: adaptive is {word} static (" in line for line in lines)


def test_a_table_as_text() -> None:
    assert text_table(("run", "KL"), [["a", "0.10"], ["longer", "1"]]) == "run       KL\na       0.10\nlonger     1"
    narrow = text_table(("run", "KL", "score"), [["a", "0.10", "3.0"]], 12)
    assert narrow == "run    KL\na    0.10\n\nrun  score\na      3.0"
