"""Hidden states of the frozen models at the states of a rollout: the reference, and the features of a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from rlhf_kl.models.lm import LM, Trunk
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.ops.head import Head
from rlhf_kl.ops.packing import Layout, Packed, idle_pass
from rlhf_kl.sharding import equally_many, has_shards, layer_by_layer

PASS_ROWS = 64  # in one pass without gradients
PASS_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 16}


class ReferenceStates:
    """The reference at a rollout's states, read once.

    From its hidden states the logits cost only a pass of the head, for each use: the exact KL of a rollout, the KL in
    the loss, and the ceiling. Where the logits of all tokens fit into one chunk, they are kept in place of that.
    """

    def __init__(self, lm: LM, share: bool = True, *, once: bool = False) -> None:
        """`share`: a pass may read a prompt once for several rows, as the sampler does. `once`: logits are not kept."""
        self.lm, self.share, self.once = lm, share, once
        self.hidden = torch.empty(0)  # (tokens, H)
        self.kept = self.hidden  # (tokens, H), or logits (tokens, V)

    def passes(self, layout: Layout, rows: Sequence[int] | None, *models: nn.Module) -> Iterator[Packed]:
        """Rows of a batch (None: all) in passes without gradients through these models, inside of `layer_by_layer`."""
        tokens = PASS_TOKENS.get(layout.device.type, PASS_TOKENS["cpu"])
        chosen, shards = range(len(layout.lengths)) if rows is None else rows, has_shards(*models)
        share = self.share and not shards  # a pass that shares prompts calls the layers more than once
        passes = layout.passes(chosen, most_rows=PASS_ROWS, most_tokens=tokens, share=share)
        return equally_many(list(passes), idle_pass(layout.device), layout.device) if shards else passes

    @torch.no_grad()
    def read(self, layout: Layout) -> None:
        """Start a new rollout; drops the last one."""
        self.hidden = self.kept = torch.empty(0)
        with layer_by_layer(self.lm):
            for rows in self.passes(layout, None, self.lm):
                hidden = self.lm.hidden(rows)
                if not len(self.hidden):
                    self.hidden = hidden.new_empty(layout.tokens, hidden.shape[1])
                self.hidden[rows.numbers] = hidden
            head = self.lm.head()
            fits = not self.once and len(self.hidden) <= head.chunk(self.hidden.device)
            self.kept = head.logits(self.hidden) if fits else self.hidden

    def at(self, numbers: Tensor) -> Tensor:
        """What `head` makes logits of, for response tokens of the rollout by number (n,): (n, H) or (n, V)."""
        return self.kept.index_select(0, numbers)

    def head(self) -> Head:
        """From what `at` gives to the logits."""
        head = self.lm.head()
        return head if self.kept is self.hidden else head.of_logits()


class KeepsStates(Protocol):
    """A reward model that keeps the states of the texts that it scored last."""

    trunk: Trunk
    keeps_states: bool
    kept: tuple[Layout, Tensor] | None  # the texts, with a token more behind each, and their states (N, H)

    @property
    def hidden_size(self) -> int:
        """Numbers in a state."""


class StateFeatures:
    """Features of a rollout's states from frozen models, computed once.

    They are the last hidden states of the reference, which are computed anyway, and of reward models with the same
    tokens: their states from scoring, if they read a response in the policy's tokens. These models are causal, so a
    state's features depend on no later token.
    """

    def __init__(self, critic: FeatureCritic, rewards: Sequence[KeepsStates] = ()) -> None:
        self.critic = critic
        self.rewards = list(rewards)
        self.kept = torch.empty(0)  # (tokens, F) float32
        for reward in self.rewards:
            reward.keeps_states = True

    @torch.no_grad()
    def read(self, layout: Layout, reference: ReferenceStates) -> Tensor:
        """Start a new rollout, whose responses were scored last; returns its values (B, T), on the CPU."""
        parts = [_scaled(reference.hidden)]
        for reward in self.rewards:
            states = torch.zeros(layout.tokens, reward.hidden_size, device=layout.device)
            with layer_by_layer(reward.trunk):
                for rows in reference.passes(layout, _recall(layout, reward, states), reward.trunk):
                    states[rows.numbers] = _scaled(reward.trunk.hidden(rows))
            parts.append(states)
        self.kept = torch.cat(parts, 1)
        values: Tensor = layout.grid(self.critic(self.kept).unsqueeze(0))[0]
        return values


def _recall(layout: Layout, reward: KeepsStates, states: Tensor) -> list[int]:
    """Fill in the `states` (tokens, H) of texts that were scored in the policy's tokens; returns the other rows."""
    ids = layout.ids.tolist()
    if reward.kept is None:
        return list(range(len(ids)))
    texts, kept = reward.kept
    read = texts.ids.tolist()
    missing = list(range(len(read), len(ids)))
    for row in range(min(len(read), len(ids))):
        prompt, response, length = int(layout.prompts[row]), int(layout.responses[row]), layout.lengths[row]
        alone = int(texts.prompts[row])  # tokens of the prompt, as the reward model reads it
        start, begin = layout.prompt_width - prompt, texts.prompt_width - alone
        same = length <= texts.lengths[row] and read[row][begin : begin + length] == ids[row][start : start + length]
        if alone > prompt or not same:
            missing.append(row)
        else:
            first, source = int(layout.first[row]), int(texts.first[row]) + prompt - alone
            states[first : first + response] = _scaled(kept[source : source + response])
    return missing


def _scaled(states: Tensor) -> Tensor:
    """Normalise hidden states: their scale differs between models, and some have a few huge channels."""
    return layer_norm(states.float(), states.shape[-1:])
