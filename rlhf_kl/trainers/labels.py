"""Reward models from labelled texts: a logistic head for labels 0 and 1, a regression for any other numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kl.data.texts import Labelled
from rlhf_kl.rewards.model import RewardModel


def is_binary(rows: Sequence[Labelled]) -> bool:
    """Whether every label is 0 or 1."""
    return all(row.label in (0.0, 1.0) for row in rows)


class LabelObjective:
    """The score is the log-odds of label 1 (cross-entropy), or the predicted number (half the squared error)."""

    def __init__(self, reward_model: RewardModel, rows: Sequence[Labelled], *, binary: bool) -> None:
        self.reward_model, self.binary = reward_model, binary
        self.encoded = reward_model.encode([""] * len(rows), [row.text for row in rows])
        self.labels = torch.tensor([row.label for row in rows])

    def __len__(self) -> int:
        return len(self.encoded)

    def size(self, row: int) -> int:
        """Tokens of a text."""
        return len(self.encoded[row])

    def weight(self, _row: int, /) -> float:
        """Every text counts the same."""
        return 1.0

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss; `train/accuracy` counts right labels, for a classifier."""
        scores = self.reward_model.forward([self.encoded[i] for i in rows])
        labels = self.labels[rows].to(scores)
        if not self.binary:
            return 0.5 * (scores - labels).square().sum(), {}
        right = float(((scores > 0) == (labels > 0.5)).sum())
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum"), {"train/accuracy": right}
