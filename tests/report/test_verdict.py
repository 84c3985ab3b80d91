"""Sentences, from figures that leave only one of them true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.target import HELD
from rlhf_kl.report.verdict import FRONTIER, judge

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
        "adaptive held the target of 0.1 nats per token from every start (2 starting betas): tail error 0.02, 100% of "
        "the updates in band."
    )
    assert lines[1] == (
        "static does not control the KL, as its beta does not depend on it; its KL was at the target of 0.1 nats per "
        "token with static-1x (1.0x the target, tail error 0.02, 100% in band), and away from it with static-0.1x "
        "(4.1x the target, tail error 3.1, 0% in band), static-10x (0.10x the target, tail error 0.90, 0% in band)."
    )
    assert lines[2] == HELD
    # 3.08 and 0.898 over the 0.02 of the adaptive runs.
    assert lines[3] == "Away from the target, the tail error of static is 45 to 154 times that of adaptive."
    assert lines[4].startswith("At equal KL the score of adaptive is the same within the spread as that of static")
    assert "95 % interval" in lines[4]
    assert lines[-2].startswith("Cost in held-out perplexity: adaptive +3%; static +0% to +1")
    assert lines[-1] == FRONTIER


def test_a_schedule_holds_nothing_either(grid: Grid) -> None:
    lines = judge(grid({"linear": ("schedule", 0.2, 0.1), "b": ("pid", 0.2, 0.1)}, seeds=1))
    assert lines[0].startswith(
        "linear does not control the KL, as its beta does not depend on it; its KL was at the target"
    )


BACKTRACK = {"value": 0.15, "action": "backtrack"}


@pytest.mark.parametrize("other", [None, {"value": 0.2, "action": "backtrack"}, {"value": 0.15, "action": "stop"}])
def test_no_ratio_where_ceilings_differ(grid: Grid, other: dict[str, Any] | None) -> None:
    kinds = {name: "adaptive" in name for name in TWO}
    lines = judge(grid(TWO, seeds=2, ceiling={name: BACKTRACK if kind else other for name, kind in kinds.items()}))
    assert "The tail errors of static and adaptive are not compared: their ceilings differ." in lines
    assert not any("times that of" in line for line in lines)


def test_a_ratio_where_both_have_the_same_ceiling(grid: Grid) -> None:
    lines = judge(grid(TWO, seeds=2, ceiling=dict.fromkeys(TWO, BACKTRACK)))
    assert any("times that of" in line for line in lines)


@pytest.mark.parametrize(("target", "told"), [(0.1, True), (0.12, False)])
def test_no_ratio_where_targets_differ(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], target: float, told: bool
) -> None:
    """The run at another target is held as well; only beside the same target its tail error says something."""
    controlled = {"controller": {"kind": "adaptive"}, "ceiling": BACKTRACK}
    paths = [
        write_run("far", metrics_rows([0.3] * 60), config={"kl": controlled | {"target": 0.1}, "ppo": {"lam": 0.9}}),
        write_run(
            "near",
            metrics_rows([target * (1 + error) for error in (0.01, -0.01)] * 30, target=target),
            config={"kl": controlled | {"target": target}, "ppo": {"lam": 0.8}},
        ),
    ]
    lines = judge(read_comparison(paths))
    assert any("tail error" in line and "that of" in line for line in lines) == told
    assert not any("are not compared: their ceilings" in line for line in lines)


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


def test_a_target_that_some_seeds_missed_is_told_with_their_number(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any]
) -> None:
    """Means may pass where one seed does not."""
    wild = [0.1] * 45 + [0.13] * 10 + [0.1] * 5
    paths = [
        write_run(f"run-s{seed}", metrics_rows(kls), config={"run": {"seed": seed}})
        for seed, kls in enumerate(([0.1] * 60, wild))
    ]
    assert "in band, missed in 1 of 2 seeds)" in judge(read_comparison(paths))[0]


def test_three_single_runs_at_one_kl(grid: Grid) -> None:
    ends = {"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.1), "c": ("dual", 0.2, 0.1)}
    lines = judge(grid(ends, seeds=1, extra={"a": -1.4, "b": -0.86, "c": -0.4}))
    scores = [line for line in lines if line.startswith("At equal KL the score")]
    assert scores == [
        "At equal KL the score of b differs from that of a (by +0.54, 1 seed: too few for an interval).",
        "At equal KL the score of c differs from that of a (by +1.00, 1 seed: too few for an interval).",
        "At equal KL the score of c differs from that of b (by +0.46, 1 seed: too few for an interval).",
    ]


WIDE = {
    "adaptive": ("adaptive", 0.2, 0.2),
    "static-0.1x": ("fixed", 0.02, 0.6),
    "static-10x": ("fixed", 2.0, 0.01),
}


@pytest.mark.parametrize("seeds", [1, 5])
def test_ends_too_far_apart_to_tell(grid: Grid, seeds: int) -> None:
    lines = judge(grid(WIDE, seeds=seeds, gain=lambda x: 2.5 * x / (1 + x)))
    line = next(line for line in lines if line.startswith("At equal KL the score"))
    assert line.startswith("At equal KL the score of adaptive cannot be told from that of static (")
    assert ("most of it for the gaps between the ends of static, 5 seeds" in line) == (seeds == 5)
    assert ("for the gaps between the ends of static, 1 seed: too few" in line) == (seeds == 1)


@pytest.mark.parametrize(("shift", "word"), [(0.5, "higher than"), (-0.5, "lower than")])
def test_a_true_difference(grid: Grid, shift: float, word: str) -> None:
    lines = judge(grid(TWO, extra={"adaptive-0.1x": shift, "adaptive-1x": shift * 1.2}))
    assert any(f"the score of adaptive is {word} that of static" in line for line in lines)


def test_what_the_ceiling_did_is_said(write_run: Callable[..., Path], metrics_rows: Callable[..., Any]) -> None:
    rows = metrics_rows([0.1] * 60)
    for row in rows[45:60]:
        row["kl/backtrack_factor"] = 0.7
    lines = judge(read_comparison([write_run("cut", rows)]))
    assert "Updates of the second half that the ceiling shortened: cut 50%." in lines


def test_scores_that_cannot_be_set_side_by_side(grid: Grid) -> None:
    lines = judge(grid({"a": ("adaptive", 0.2, 0.1), "b": ("pid", 0.2, 0.2)}, seeds=1))
    assert any(line.startswith("The scores are not compared: ") for line in lines)
