from __future__ import annotations

import math

import pytest
import torch

from rlhf_kl.supervised.figures import calibration_error, histogram, label_figures, pair_figures


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_hand_table_of_calibration() -> None:
    """Four predictions at 0.9 of which three are right, four at 0.62 of which two are: 0.15 and 0.12 off."""
    odds = torch.tensor([logit(0.9)] * 4 + [-logit(0.62)] * 4)
    right = torch.tensor([True, True, True, False, True, True, False, False])
    assert calibration_error(odds, right) == pytest.approx(0.5 * 0.15 + 0.5 * 0.12, abs=1e-6)


def test_scores_that_are_true_log_odds_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    odds = torch.randn(200_000, generator=generator) * 2
    label = torch.rand(200_000, generator=generator) < torch.sigmoid(odds)
    assert calibration_error(odds, (odds > 0) == label) < 0.01
    assert calibration_error(3 * odds, (odds > 0) == label) > 0.05  # too sure of itself


def test_figures_of_pairs() -> None:
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 3.0, 0.0, -1.0])
    found = pair_figures(chosen, rejected)
    assert found["eval/accuracy"] == 0.5  # a tie is not right
    assert found["eval/margin"] == 0.5
    expected = sum(math.log1p(math.exp(-margin)) for margin in (1, -1, 0, 2)) / 4
    assert found["eval/loss"] == pytest.approx(expected)


def test_figures_of_labels() -> None:
    scores, positive = torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([True, True, False, False])
    found = label_figures(scores, positive)
    assert (found["eval/accuracy"], found["eval/majority"]) == (0.5, 0.5)
    expected = sum(math.log1p(math.exp(wrong)) for wrong in (-2, 1, 0.5, -3)) / 4
    assert found["eval/loss"] == pytest.approx(expected)


def test_a_histogram_counts_everything_once() -> None:
    groups = {"a": torch.linspace(-1, 1, 41), "b": torch.tensor([0.0, 1.0])}
    found = histogram(groups)
    assert (found["edges"][0], found["edges"][-1], len(found["edges"])) == (-1.0, 1.0, 21)
    assert (sum(found["a"]), sum(found["b"])) == (41, 2)
    assert histogram({"a": torch.ones(5)})["edges"][0] < 1.0
