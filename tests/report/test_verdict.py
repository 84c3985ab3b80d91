"""Sentences, from figures that leave only one of them true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.verdict import judge, text_table

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
    assert lines[0] == (
        "adaptive held the target of 0.1 nats per token from every start (2 starting betas): tail error 0.02, 100% in "
        "band."
    )
    assert lines[1] == (
        "static does not control the KL. Beside the target of 0.1 nats per token: static-1x (1.0x the target, tail "
        "error 0.02, 100% in band), static-0.1x (4.1x the target, tail error 3.1, 0% in band), static-10x (0.10x the "
        "target, tail error 0.90, 0% in band)."
    )
    assert lines[2].startswith("At equal KL the score of adaptive cannot be told from that of static (")
    assert "95 % interval" in lines[2]
    assert lines[-1].startswith("Cost in held-out perplexity: adaptive +3%; static +0% to +1")


def test_held_takes_the_tail_error_and_the_time_in_band(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any]
) -> None:
    """A run with a tail error of 0.18 and 62 % of its updates in the band has missed the target."""
    wild = [0.1 * (1 + error) for error in [0.0] * 14 + [0.07, 0.27, 0.1, 0.28, 0.15] * 9 + [0.27]]
    brief = [0.1] * 45 + [0.13] * 10 + [0.1] * 5  # small on average, but often out of the band
    paths = [write_run(name, metrics_rows(kls), config={"ppo": {"lam": lam}}) for name, kls, lam in (
        ("wild", wild, 0.9), ("brief", brief, 0.8), ("calm", [0.1] * 60, 0.7))]  # fmt: skip
    comparison = read_comparison(paths)
    assert [variant.held for variant in comparison.variants] == [False, False, True]
    lines = judge(comparison)
    goal = "missed the target of 0.1 nats per token"
    assert lines[0] == f"wild {goal}: wild (1.2x the target, tail error 0.18, 59% in band)."
    assert lines[1] == f"brief {goal}: brief (1.2x the target, tail error 0.10, 78% in band)."
    assert lines[2].startswith("calm held the target of 0.1 nats per token: ")


def test_seeds_that_missed_and_updates_that_the_ceiling_cut_are_counted(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any]
) -> None:
    """Means may pass where one seed does not."""
    wild = [0.1] * 45 + [0.13] * 10 + [0.1] * 5
    paths = []
    for seed, kls in enumerate(([0.1] * 60, wild)):
        rows = metrics_rows(kls)
        for row in rows[45:60]:
            row["kl/backtrack_factor"] = 0.7
        paths.append(write_run(f"run-s{seed}", rows, config={"run": {"seed": seed}}))
    line = judge(read_comparison(paths))[0]
    assert "in band, 50% of the late updates shortened by the ceiling, missed in 1 of 2 seeds)" in line


@pytest.mark.parametrize(("shift", "word"), [(0.5, "higher than"), (-0.5, "lower than")])
def test_a_true_difference(grid: Grid, shift: float, word: str) -> None:
    lines = judge(grid(TWO, extra={"adaptive-0.1x": shift, "adaptive-1x": shift * 1.2}))
    assert any(f"the score of adaptive is {word} that of static" in line for line in lines)


def test_a_table_as_text() -> None:
    assert text_table(("run", "KL"), [["a", "0.10"], ["longer", "1"]]) == "run       KL\na       0.10\nlonger     1"
