"""Sentences, from figures that leave only one of them true."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.report.comparison import Comparison, read_comparison
from rlhf_kl.report.sentences import figures_table, judge
from rlhf_kl.report.sweep import FIGURES, Figure, Sweep, SweepPoint, recommend, sweep_of
from rlhf_kl.text import text_table
from tests.conftest import REPOSITORY
from tests.runs import Rows, Write

Grid = Callable[..., Comparison]

NONE: Figure = (None, None)
REFERENCE = {"reference": {"scores_shaped": 0.0}}


def test_a_constant_beta_that_lands_in_the_band_has_held_nothing(grid: Grid) -> None:
    comparison = grid()
    lines = judge(comparison)
    assert len(lines) == 4
    assert lines[0] == (
        "KL target of 0.1 nats per token: held by adaptive-0.1x, adaptive-1x (off by 0% to 4% on average); "
        "static ended with a KL of 0.10x to 4.1x its target."
    )
    assert lines[1].startswith("Score at equal KL: no difference between adaptive and static (")
    assert "95 % interval" in lines[1]
    assert lines[2].startswith("True score at equal KL: ")
    assert lines[3].startswith("Cost in held-out perplexity: adaptive +3%; static +0% to +1")
    assert sweep_of(comparison) is None  # no targets were tried


def test_without_gold_nothing_is_said_of_it(write_run: Write, metrics_rows: Rows) -> None:
    paths = []
    for target in (0.05, 0.1, 0.2):
        for seed in (0, 1):
            rows = metrics_rows([target] * 30, target=target, gold=False)
            config = {"run": {"seed": seed}, "kl": {"target": target}}
            paths.append(write_run(f"t{target}-s{seed}", rows, config=config, summary=REFERENCE))
    comparison = read_comparison(paths)
    held, cost, hint = judge(comparison)
    assert "held by t0.05, t0.1, t0.2 (off by 0% on average)" in held
    assert "perplexity" in cost
    assert "scale RUN" in hint
    assert figures_table(comparison)[0] == ["variant", "target", "KL/token", "score", "perplexity"]


FINE = {"perplexity": (3.1, 3.2, 3.3), "pairs": (0.3, 0.28, 0.26), "gain": (2.0, 3.0, 4.0)}


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({}, 0.2, "no limit was met (perplexity is 1.10 times"),
        ({"perplexity": (3.1, 7.4, 7.6)}, 0.1, "at 0.2 the held-out perplexity is 2.53 times the"),
        ({"pairs": (0.3, 0.04, 0.1)}, 0.05, "at 0.1 distinct word pairs are 13% of the reference"),
        ({"gain": (2.0, 3.0, 3.01)}, 0.1, "at 0.2 the score rises 1% as fast with √KL as at its"),
        ({"gain": (2.0, 3.0, 3.3)}, 0.2, "no limit was met"),
        ({"gain": (0.2, 3.0, 3.2)}, 0.1, "at 0.2 the score rises 5% as fast"),
        ({"gain": (2.0, 3.0, 2.9), "pairs": (0.3, 0.3, 0.01)}, 0.1, "are 3% of the reference's (limit 15%), the score"),
        ({"perplexity": (9.0, 9.0, 9.0)}, None, "at 0.05 the held-out perplexity is 3.00"),
        ({"gain": (-0.1, 3.0, 4.0)}, None, "at 0.05 the score rises 0%"),
    ],
)
def test_the_suggested_target_is_the_last_one_below_a_limit(changes: Any, target: float | None, words: str) -> None:
    figures = FINE | changes
    points = [
        SweepPoint(
            kl,
            dict.fromkeys(FIGURES, NONE)
            | {"kl_sequence": (20 * kl, None), "scores": (figures["gain"][i], None)}
            | {"perplexity": (figures["perplexity"][i], None), "distinct_2": (figures["pairs"][i], None)},
            figures["gain"][i],
        )
        for i, kl in enumerate((0.05, 0.1, 0.2))
    ]
    found = recommend(Sweep("token", points, {"perplexity": 3.0, "distinct_2": 0.3}, ""))
    assert found.target == target
    assert words in found.reason


@pytest.mark.parametrize(("error", "target"), [(0.0, 0.1), (0.14, 0.1), (0.15, 0.2)])
def test_a_score_that_may_still_rise_meets_no_limit(error: float, target: float) -> None:
    # By hand: roots 1, 2, 3; slopes 1, 1 and -0.05, whose error is sqrt(2) of a score's; the limit is 0.15.
    figures: dict[str, Figure] = dict.fromkeys(FIGURES, NONE)
    points = [
        SweepPoint(each, figures | {"kl_sequence": (root**2, None), "scores": (gain, error)}, gain)
        for each, root, gain in ((0.05, 1.0, 1.0), (0.1, 2.0, 2.0), (0.2, 3.0, 1.95))
    ]
    found = recommend(Sweep("token", points, {"perplexity": None, "distinct_2": None}, ""))
    assert (found.target, "rises 0% as fast" in found.reason) == (target, target == 0.1)


def test_a_policy_at_two_targets_is_no_score_that_stays() -> None:
    """`scale --save 0.0375` may find the policy of 0.037 near enough."""
    figures: dict[str, Figure] = dict.fromkeys(FIGURES, NONE)
    points = [
        SweepPoint(each, figures | {"kl_sequence": (root**2, 0.1), "scores": (root, 0.1)}, root, rise_error=0.0)
        for each, root in ((0.02, 1.0), (0.037, 1.4), (0.0375, 1.4), (0.075, 2.0))
    ]
    found = recommend(Sweep("token", points, {"perplexity": None, "distinct_2": None}, ""))
    assert found.target == 0.075


@pytest.mark.parametrize(("rise_error", "target"), [(0.01, 0.1), (0.3, 0.2), (None, 0.2)])
def test_a_rise_between_the_same_prompts_has_an_error_of_its_own(rise_error: float | None, target: float) -> None:
    """Each score is unsure by 0.2, since prompts differ; how far it rises from target to target may be surer."""
    figures: dict[str, Figure] = dict.fromkeys(FIGURES, NONE)
    points = [
        SweepPoint(each, figures | {"kl_sequence": (root**2, 0.1), "scores": (gain, 0.2)}, gain, rise_error=rise_error)
        for each, root, gain in ((0.05, 1.0, 1.0), (0.1, 2.0, 2.0), (0.2, 3.0, 1.95))
    ]
    found = recommend(Sweep("token", points, {"perplexity": None, "distinct_2": None}, ""))
    assert found.target == target


@pytest.mark.parametrize(
    ("kls", "words"),
    [
        ([0.1] * 45 + [0.13] * 10 + [0.1] * 5, "; missed by run (1 of 2 seeds) (off by 10% on average)"),
        ([0.03] * 40 + [0.1] * 20, "; reached late by run (1 of 2 seeds) (off by 0% on average since)"),
        ([0.1] * 10, "; too early to say of run (1 of 2 seeds) (under 15 updates)"),
        ([0.01] * 20 + [0.03] * 5 + [0.06] * 5, "; too early to say of run (1 of 2 seeds) (the KL still rises)"),
    ],
)
def test_seeds_are_counted_by_their_verdict(write_run: Write, metrics_rows: Rows, kls: list[float], words: str) -> None:
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
    lines = judge(grid(extra={"adaptive-0.1x": shift, "adaptive-1x": shift * 1.2}))
    assert any(f"Score at equal KL: adaptive is {word} static (" in line for line in lines)


def test_alerts_of_the_runs_are_named(write_run: Write, metrics_rows: Rows) -> None:
    rows = metrics_rows([0.1] * 30, target=0.1)
    rows[3] |= {"alerts": ["kl-spike: one", "kl-climbing: two"]}
    rows[9] |= {"alerts": ["kl-spike: again"]}
    paths = [
        write_run("calm", metrics_rows([0.1] * 30, target=0.1), config={"ppo": {"learning_rate": 1e-4}}),
        write_run("wild", rows),
    ]
    comparison = read_comparison(paths)
    assert [line for line in judge(comparison) if line.startswith("Alerts")] == [
        "Alerts: wild (kl-spike, kl-climbing)."
    ]


def test_a_short_run_of_a_constant_beta_says_how_short(write_run: Write, metrics_rows: Rows) -> None:
    paths = [
        write_run(
            f"b{coef}",
            metrics_rows([0.1] * 4, target=0.1),
            config={"kl": {"controller": {"kind": "fixed", "coef": coef}}},
        )
        for coef in (0.1, 0.2)
    ]
    assert "its target after only 4 updates" in judge(read_comparison(paths))[0]


def test_the_titles_of_the_picture_count_what_was_held(grid: Grid) -> None:
    charts = runpy.run_path(str(REPOSITORY / "scripts" / "figures.py"))["held_by_family"](grid())
    assert [chart.title for chart in charts] == ["adaptive: held in 10 of 10 runs", "static: ends at 0.1x to 4.1x"]
    assert [line.label for line in charts[0].lines if line.label] == ["0.1x", "1x"]
    assert len(charts[0].lines) == 10


def test_a_table_as_text() -> None:
    assert text_table(("run", "KL"), [["a", "0.10"], ["longer", "1"]]) == "run       KL\na       0.10\nlonger     1"
    assert text_table(("run", "KL"), [["你好", "1"], ["ab", "2"]]) == "run   KL\n你好   1\nab     2"  # two columns wide
    narrow = text_table(("run", "KL", "score"), [["a", "0.10", "3.0"]], 12)
    assert narrow == "run    KL\na    0.10\n\nrun  score\na      3.0"
