from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.report.overoptimisation import gold_against_kl, gold_peak, reference_perplexity, smooth
from rlhf_kl.report.run import RunResult, read_run


@pytest.fixture
def run(write_run: Callable[..., Path], metrics_rows: Callable[..., list[dict[str, Any]]]) -> Callable[..., RunResult]:
    return lambda kls, **options: read_run(write_run("run", metrics_rows(kls, **options)))


def test_gold_turns_over_where_its_parabola_does(run: Callable[..., RunResult]) -> None:
    """Gold is 0.5 d - 0.1 d^2 with d = sqrt(2 KL): highest at d = 2.5."""
    climbing = run([0.005 * i for i in range(60)])
    peak = gold_peak(climbing)
    assert peak is not None
    assert math.sqrt(2) * peak.root_kl == pytest.approx(2.5, rel=0.03)
    assert peak.gold == pytest.approx(0.625, rel=0.01)
    assert peak.passed
    assert peak.gold_end < 0.6


def test_gold_that_still_rises_has_no_turn(run: Callable[..., RunResult]) -> None:
    peak = gold_peak(run([0.001 * i for i in range(60)]))
    assert peak is not None
    assert not peak.passed


def test_noise_around_a_level_is_no_turn(
    write_run: Callable[..., Path], metrics_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """At a KL that is held the highest of many noisy values lies somewhere, and above the last one."""
    for seed in range(20):
        rng = random.Random(seed)
        rows = metrics_rows([min(0.1, 0.01 * step) for step in range(60)])
        for row in rows[:60]:
            row["objective/gold"] += rng.gauss(0, 0.3)
        peak = gold_peak(read_run(write_run(f"noisy-{seed}", rows)))
        assert peak is not None
        assert not peak.passed


def test_without_gold_there_is_none(run: Callable[..., RunResult]) -> None:
    without_gold = run([0.1] * 20, gold=False)
    assert gold_against_kl(without_gold) == []
    assert gold_peak(without_gold) is None


def test_samples_under_the_reference(run: Callable[..., RunResult]) -> None:
    steps, values = reference_perplexity(run([0.0, 0.3]))
    assert steps == [1.0, 2.0]
    assert values == pytest.approx([math.exp(1.2), math.exp(1.5)])


def test_smoothing_keeps_a_line_and_its_length() -> None:
    line = [float(i) for i in range(9)]
    assert smooth(line) == pytest.approx([1.0, 1.5, *line[2:-2], 6.5, 7.0])
    assert smooth([]) == []
