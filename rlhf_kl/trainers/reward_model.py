"""Reward models from preference pairs with the Bradley-Terry loss (Ouyang et al. 2022, 2203.02155, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_kl.data.texts import Pair
from rlhf_kl.ops.losses import bradley_terry_loss
from rlhf_kl.rewards.model import RewardModel


class PairObjective:
    """Both responses of a pair in one pass: the loss is -log sigmoid(score of chosen - score of rejected)."""

    def __init__(self, reward_model: RewardModel, pairs: Sequence[Pair]) -> None:
        self.reward_model = reward_model
        prompts = [pair.prompt for pair in pairs]
        self.chosen = reward_model.encode(prompts, [pair.chosen for pair in pairs])
        self.rejected = reward_model.encode(prompts, [pair.rejected for pair in pairs])

    def __len__(self) -> int:
        return len(self.chosen)

    def size(self, row: int) -> int:
        """Tokens of the longer response."""
        return max(len(self.chosen[row]), len(self.rejected[row]))

    def weight(self, _row: int, /) -> float:
        """Every pair counts the same."""
        return 1.0

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss in nats; `train/accuracy` counts pairs in the right order."""
        scores = self.reward_model.forward([self.chosen[i] for i in rows] + [self.rejected[i] for i in rows])
        chosen, rejected = scores.chunk(2)
        return bradley_terry_loss(chosen, rejected).sum(), {"train/accuracy": float((chosen > rejected).sum())}


def initialise_head(score: nn.Linear, seed: int) -> None:
    """N(0, 1/(d+1)) weights (Huang et al. 2023, reward head initialisation), drawn for this head alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        score.weight.copy_(torch.randn(score.weight.shape, generator=generator) / (score.in_features + 1) ** 0.5)
        if score.bias is not None:
            score.bias.zero_()
