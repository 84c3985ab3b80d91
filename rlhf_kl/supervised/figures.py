"""Quality of a reward model on held-out data: accuracy, calibration, and the distribution of its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 10
HISTOGRAM_BINS = 20


def calibration_error(log_odds: Tensor, right: Tensor) -> float:
    """Expected calibration error of binary predictions.

    `log_odds` (N,) of the predictions, `right` (N,) bool: whether the prediction was right. Ten bins of equal width
    between probability 0.5 and 1. Source: Guo et al. 2017 (1706.04599), equation 3.
    """
    confidence = torch.sigmoid(log_odds.double().abs())
    place = ((confidence - 0.5) * 2 * BINS).long().clamp_max(BINS - 1)
    bins = [place == i for i in range(BINS)]
    gaps = [float((confidence[rows] - right[rows].double()).sum().abs()) for rows in bins]
    return sum(gaps) / len(confidence)


def pair_figures(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Figures of scores (N,) of the preferred and the other responses.

    Accuracy counts pairs in the right order (a tie is wrong); loss is -log sigmoid(difference) in nats.
    """
    margin = chosen - rejected
    return {
        "eval/accuracy": float((margin > 0).float().mean()),
        "eval/loss": float(-F.logsigmoid(margin).mean()),
        "eval/calibration_error": calibration_error(margin, margin > 0),
        "eval/margin": float(margin.mean()),
    }


def label_figures(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Figures of scores (N,), the log-odds of label 1, against `positive` (N,) bool: whether the label is 1."""
    right = (scores > 0) == positive
    return {
        "eval/accuracy": float(right.float().mean()),
        "eval/loss": float(F.binary_cross_entropy_with_logits(scores, positive.to(scores))),
        "eval/calibration_error": calibration_error(scores, right),
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
