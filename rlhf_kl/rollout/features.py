"""Values of a rollout's states by a `FeatureCritic`, and the features that it reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.ops.packing import Layout
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rollout.reference import ReferenceStates, reading_passes


class StateFeatures:
    """Features of a rollout's states from frozen models, computed once.

    They are the last hidden states of the reference, which are computed anyway, and of reward models with the same
    tokens: their states from scoring, if they read a response in the policy's tokens. These models are causal, so a
    state's features depend on no later token.
    """

    def __init__(self, critic: FeatureCritic, rewards: Sequence[RewardModel] = ()) -> None:
        self.critic, self.rewards = critic, list(rewards)
        self.kept = torch.empty(0)  # (tokens, F) float32
        for reward in self.rewards:
            reward.keeps_states = True

    @torch.no_grad()
    def read(self, layout: Layout, reference: ReferenceStates) -> None:
        """Start a new rollout, whose responses were scored last; drops the previous one."""
        parts = [_scaled(reference.hidden)]
        for reward in self.rewards:
            states = torch.zeros(layout.tokens, reward.hidden_size, device=layout.device)
            for rows in reading_passes(layout, _recall(layout, reward, states)):
                states[rows.numbers] = _scaled(reward.trunk.hidden(rows))
            parts.append(states)
        self.kept = torch.cat(parts, 1)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Values (tokens,) of all response tokens of the rollout."""
        values: Tensor = self.critic(self.kept)
        return values


def _recall(layout: Layout, reward: RewardModel, states: Tensor) -> list[int]:
    """Fill in the `states` (tokens, H) of texts that were scored in the policy's tokens; returns the other rows."""
    ids = layout.ids.tolist()
    missing = list(range(len(reward.kept), len(ids)))
    for row, text in enumerate(reward.kept[: len(ids)]):
        prompt, response = int(layout.prompts[row]), int(layout.responses[row])
        start, length = layout.prompt_width - prompt, layout.lengths[row]
        if text.ids[:length] != ids[row][start : start + length]:
            missing.append(row)
        else:
            first = int(layout.first[row])
            states[first : first + response] = _scaled(text.states[prompt - 1 : prompt - 1 + response])
    return missing


def _scaled(states: Tensor) -> Tensor:
    """Normalise hidden states: their scale differs between models, and some have a few huge channels."""
    return layer_norm(states.float(), states.shape[-1:])
