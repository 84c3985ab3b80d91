"""Quality of a reward model on held-out data: accuracy, calibration, and the distribution of its scores."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 10
HISTOGRAM_BINS = 20
# Log-odds (N,) of binary predictions, whether each was right (N,) bool, and the scores by group.
Predictions: TypeAlias = tuple[Tensor, Tensor, dict[str, Tensor]]


class CalibrationBin(NamedTuple):
    """Predictions of about the same confidence, and how many of them were right."""

    confidence: float  # mean of the predicted probability of being right, 0.5 to 1
    accuracy: float
    size: int


def calibration(log_odds: Tensor, right: Tensor) -> tuple[float, list[CalibrationBin]]:
    """Expected calibration error of binary predictions, and its bins.

    `log_odds` (N,) of the predictions, `right` (N,) bool: whether the prediction was right. Ten bins of equal width
    between probability 0.5 and 1. Source: Guo et al. 2017 (1706.04599), equation 3.
    """
    confidence = torch.sigmoid(log_odds.double().abs())
    place = ((confidence - 0.5) * 2 * BINS).long().clamp_max(BINS - 1)
    bins, error = [], 0.0
    for i in range(BINS):
        rows = place == i
        count = int(rows.sum())
        if count:
            sure, hit = float(confidence[rows].mean()), float(right[rows].double().mean())
            bins.append(CalibrationBin(sure, hit, count))
            error += count / len(confidence) * abs(sure - hit)
    return error, bins


def pair_figures(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Figures of scores (N,) of the preferred and the other responses.

    Accuracy counts pairs in the right order (a tie is wrong); loss is -log sigmoid(difference) in nats.
    """
    margin = chosen - rejected
    error, _ = calibration(margin, margin > 0)
    return {
        "eval/accuracy": float((margin > 0).float().mean()),
        "eval/loss": float(-F.logsigmoid(margin).mean()),
        "eval/calibration_error": error,
        "eval/margin": float(margin.mean()),
    }


def label_figures(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Figures of scores (N,), the log-odds of label 1, against `positive` (N,) bool: whether the label is 1."""
    right = (scores > 0) == positive
    return {
        "eval/accuracy": float(right.float().mean()),
        "eval/loss": float(F.binary_cross_entropy_with_logits(scores, positive.to(scores))),
        "eval/calibration_error": calibration(scores, right)[0],
        "eval/majority": float(max(positive.float().mean(), 1 - positive.float().mean())),
    }


def histogram(groups: dict[str, Tensor]) -> dict[str, Any]:
    """Counts of scores by group in twenty bins that all groups share: `edges` (21) and a list of 20 per group."""
    edges = np.histogram_bin_edges(torch.cat(list(groups.values())).double().numpy(), HISTOGRAM_BINS)
    counts = {name: np.histogram(scores.double().numpy(), edges)[0].tolist() for name, scores in groups.items()}
    return {"edges": edges.tolist(), **counts}


def sketch(counts: list[int]) -> str:
    """A histogram as one line of blocks."""
    blocks, top = " ▁▂▃▄▅▆▇█", max([*counts, 1])
    return "".join(blocks[-(-count * (len(blocks) - 1) // top)] for count in counts)
