"""Values of a rollout's states by a `FeatureCritic`, and the features that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from rlhf_kl.models.actor_critic import read_trunk
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.models.prefix_sharing import least_share
from rlhf_kl.ops.packing import Layout, Packed, pass_overhead
from rlhf_kl.reward_functions import SCORING_TOKENS, ReadText, RewardModel


class StateFeatures:
    """What frozen models make of a rollout's states, computed once.

    Last hidden states of the reference, which reads them anyway, and of reward models that know the same tokens:
    those that they had when they scored, where they read a response in the tokens that the policy wrote.
    They are causal, so a state's features know nothing of the tokens still to come.
    """

    def __init__(self, critic: FeatureCritic, rewards: Sequence[RewardModel] = ()) -> None:
        self.critic, self.rewards = critic, list(rewards)
        self.kept = torch.empty(0)  # (tokens, F) float32
        for reward in self.rewards:
            reward.keep_states()

    @torch.no_grad()
    def begin(self, layout: Layout) -> None:
        """A new rollout, whose responses were scored last; forgets the one before."""
        self.kept = torch.zeros(layout.tokens, self.critic.size, device=layout.ids.device)
        end = self.critic.size
        for reward in reversed(self.rewards):
            size = int(reward.trunk.config.get_text_config().hidden_size)
            into = self.kept[:, end - size : end]
            for packed in layout.passes(
                _recall(layout, reward.read or [], into),
                most_rows=reward.rows,
                most_tokens=SCORING_TOKENS,
                overhead=pass_overhead(layout.ids.device),
                least_share=least_share(reward.trunk, layout.ids.device),
            ):
                seen = read_trunk(reward.trunk, packed.ids, packed.mask, packed.states, packed.prefixes)
                into[packed.numbers] = _scaled(seen)
            end -= size

    def take(self, packed: Packed, hidden: Tensor) -> None:
        """Keep the features of a pass, where the reference's LM head reads `hidden` (N, H)."""
        self.kept[packed.numbers, : hidden.shape[-1]] = _scaled(hidden)

    @torch.no_grad()
    def values(self, packed: Packed) -> Tensor:
        """Values (N,) at the states of a pass whose features were taken."""
        # In float32 like its fitting, which is not under autocast.
        with torch.autocast(self.kept.device.type, enabled=False):
            values: Tensor = self.critic(self.kept.index_select(0, packed.numbers))
        return values


def _recall(layout: Layout, read: Sequence[ReadText], into: Tensor) -> list[int]:
    """Write the states of texts that were read in the policy's tokens `into` (tokens, H); the other rows."""
    rows = list(range(len(layout.lengths)))
    if len(read) != len(rows):
        return rows
    missing, ids = [], layout.ids.tolist()
    for row, text in zip(rows, read, strict=True):
        prompt, response = int(layout.prompts[row]), int(layout.responses[row])
        start = layout.prompt_width - prompt
        if not response:
            continue
        if text.ids[: layout.lengths[row]] != ids[row][start : start + layout.lengths[row]]:
            missing.append(row)
        else:
            places = slice(int(layout.first[row]), int(layout.first[row]) + response)
            into[places] = _scaled(text.states[prompt - 1 : prompt - 1 + response].to(into.device))
    return missing


def _scaled(states: Tensor) -> Tensor:
    """Hidden states differ in scale from model to model, and some have a few huge channels."""
    return layer_norm(states.float(), states.shape[-1:])


def feature_count(reference: Any, rewards: Sequence[RewardModel]) -> int:
    """Features of a state."""
    models = (reference, *(reward.trunk for reward in rewards))
    return sum(int(model.config.get_text_config().hidden_size) for model in models)
