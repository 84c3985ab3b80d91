"""The target with the highest true score, from figures set by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.report.compare import Comparison, read_comparison
from rlhf_kl.report.gold_peak import GoldPeak, gold_peak
from rlhf_kl.report.plots.targets import target_charts
from rlhf_kl.report.verdict import judge

# Gold of two seeds by target: means 1, 2.9, 3, 0; standard deviations (n - 1) 0.14, 0.42, 0.14, 0.14.
GOLDS = {0.05: (0.9, 1.1), 0.1: (2.6, 3.2), 0.2: (2.9, 3.1), 0.4: (-0.1, 0.1)}


@pytest.fixture
def sweep(write_run: Callable[..., Path], metrics_rows: Callable[..., Any]) -> Callable[..., Comparison]:
    def make(golds: dict[float, tuple[float, ...]]) -> Comparison:
        paths = []
        for target, values in golds.items():
            for seed, gold in enumerate(values):
                rows = [row | {"objective/gold": gold} for row in metrics_rows([target] * 30, target=target)]
                config = {"run": {"seed": seed}, "kl": {"target": target}}
                paths.append(write_run(f"target-{target}-s{seed}", rows, config=config))
        return read_comparison(paths)

    return make


def test_the_peak_and_the_targets_that_are_hardly_lower(sweep: Callable[..., Comparison]) -> None:
    comparison = sweep(GOLDS)
    assert gold_peak(comparison.by_target) == GoldPeak(0.2, 3.0, lowest=0.1, highest=0.2)
    assert (
        "The gold score is highest at a target of 0.2 nats per token (3.0); targets from 0.1 to 0.2 are within one "
        "standard deviation of that."
    ) in judge(comparison)
    [chart] = target_charts(comparison)
    assert "the highest gold, 3.00 at the target 0.2" in chart.caption


def test_no_peak_without_a_sweep_or_gold(sweep: Callable[..., Comparison]) -> None:
    two = sweep({target: GOLDS[target] for target in (0.1, 0.2)})
    assert gold_peak(two.by_target) is None
    assert not any(line.startswith("The gold score is highest") for line in judge(two))
    assert target_charts(two) == []
