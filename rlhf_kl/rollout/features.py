"""Values of a rollout's states by a `FeatureCritic`, and the features that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.models.last_layer import last_mlp_at
from rlhf_kl.ops.packing import Layout, Packed


class StateFeatures:
    """What frozen models make of a rollout's states, computed once.

    Last hidden states of the reference, which reads them anyway, and of reward models that read the same tokens.

    They are causal, so a state's features know nothing of the tokens still to come.
    """

    def __init__(self, critic: FeatureCritic, reward_trunks: Sequence[Any] = ()) -> None:
        self.critic, self.reward_trunks = critic, list(reward_trunks)
        self.kept = torch.empty(0)  # (tokens, F) float32

    def begin(self, layout: Layout) -> None:
        """A new rollout; forgets the last one."""
        self.kept = torch.zeros(layout.tokens, self.critic.size, device=layout.ids.device)

    @torch.no_grad()
    def take(self, packed: Packed, hidden: Tensor) -> None:
        """Keep the features of a pass, where the reference's LM head reads `hidden` (N, H)."""
        parts = [hidden]
        for trunk in self.reward_trunks:
            # Padding stands on the right of causal models, so no mask is needed; ones keep them from guessing it.
            ones = torch.ones_like(packed.ids)
            with last_mlp_at(trunk, packed.states):
                seen = trunk(input_ids=packed.ids, attention_mask=ones, use_cache=False).last_hidden_state
            parts.append(seen.flatten(0, 1).index_select(0, packed.states))
        # Hidden states differ in scale from model to model, and some have a few huge channels.
        scaled = [layer_norm(part.float(), part.shape[-1:]) for part in parts]
        self.kept[packed.numbers] = torch.cat(scaled, -1)

    @torch.no_grad()
    def values(self, packed: Packed) -> Tensor:
        """Values (N,) at the states of a pass whose features were taken."""
        # In float32 like its fitting, which is not under autocast.
        with torch.autocast(self.kept.device.type, enabled=False):
            values: Tensor = self.critic(self.kept.index_select(0, packed.numbers))
        return values


def feature_count(reference: Any, reward_trunks: Sequence[Any]) -> int:
    """Features of a state."""
    return sum(int(model.config.get_text_config().hidden_size) for model in (reference, *reward_trunks))
