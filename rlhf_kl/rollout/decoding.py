"""How a policy goes on token by token: by compiled functions, by a step of plain operations, or by its own forward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_kl.kernels.gpt2 import Decoder
from rlhf_kl.models.actor_critic import position_ids
from rlhf_kl.models.compiled import compiled_weights, plain_head
from rlhf_kl.rollout.cache import reserve
from rlhf_kl.rollout.gpt2_step import GPT2Step, gpt2_step
from rlhf_kl.rollout.prefill import read_once

Said = tuple[Tensor, Tensor | None]  # logits (b, V), and what the LM head read (b, H) where its hooks are not asked


class Decoding(Protocol):
    """Sequences that are being continued."""

    lets_go: bool  # whether rows can leave it

    def first(self) -> Said:
        """What the policy says after the prompts."""
        ...

    def next(self, tokens: Tensor) -> Said:
        """What it says after one more token each (b,)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        ...


def decoding_of(model: Any, ids: Tensor, mask: Tensor, limit: int, *, kept: bool) -> Decoding:
    """The fastest way for this model to go on from prompts (B, P), padded on the left, for up to `limit` tokens.

    `kept`: somebody keeps the logits; else those of a step may be gone with the next.
    """
    weights = compiled_weights(model, ids.device)
    if weights is not None and hasattr(model, "lm_head") and ids.shape[1] + limit <= len(weights.tensors[1]):
        decoder = Decoder(weights, plain_head(model), len(ids), ids.shape[1] + limit, kept=kept)
        return Compiled(model, decoder, ids, mask)
    return Own(model, ids, mask, limit)


class Compiled:
    """By compiled functions."""

    lets_go = True

    def __init__(self, model: Any, decoder: Decoder, ids: Tensor, mask: Tensor) -> None:
        self.model, self.decoder, self.ids, self.mask = model, decoder, ids, mask

    def first(self) -> Said:
        """Prompts that hardly differ are read by the model, each beginning once; else by the compiled functions."""
        read = read_once(self.model, self.ids, self.mask)
        if read is not None:
            self.decoder.take([(layer.keys, layer.values) for layer in read[1].layers], self.mask)
            return read[0], None
        lengths, columns = self.mask.sum(1, keepdim=True), torch.arange(self.ids.shape[1], device="cpu")
        from_left = (columns + self.ids.shape[1] - lengths).clamp_max(self.ids.shape[1] - 1)
        return self.decoder.read(self.ids.gather(1, from_left), columns < lengths)

    def next(self, tokens: Tensor) -> Said:
        """One more token each."""
        return self.decoder(tokens)

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        self.decoder.keep(rows)


class Own:
    """By the model's own forward, from the second token on by a step of plain operations where it is a GPT-2."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, limit: int) -> None:
        self.model, self.ids, self.mask, self.seen = model, ids, mask, ids.shape[1]
        self.attention = torch.cat([mask, mask.new_ones(len(ids), limit)], 1)
        self.positions = position_ids(self.attention)
        self.quick: GPT2Step | None = gpt2_step(model)
        self.cache: Any = None
        self.lets_go = False

    def first(self) -> Said:
        """What it says after the prompts."""
        read = read_once(self.model, self.ids, self.mask)
        logits, self.cache = read if read is not None else self._forward(self.ids)
        if self.quick is not None and not self.quick.begin(self.cache, self.attention):
            self.quick = None
        self.lets_go = self.quick is not None or reserve(self.cache, self.attention.shape[1])
        return logits, None

    def next(self, tokens: Tensor) -> Said:
        """One more token each."""
        self.seen += 1
        if self.quick is not None:
            return self.quick(tokens, self.positions[:, self.seen - 1], self.seen)
        logits, self.cache = self._forward(tokens.unsqueeze(1))
        return logits, None

    def _forward(self, ids: Tensor) -> tuple[Tensor, Any]:
        output = self.model(
            input_ids=ids,
            attention_mask=self.attention[:, : self.seen],
            position_ids=self.positions[:, self.seen - ids.shape[1] : self.seen],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1], output.past_key_values

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        if self.quick is not None:
            self.quick.keep(rows)
        else:
            self.cache.batch_select_indices(rows)
        self.attention, self.positions = self.attention.index_select(0, rows), self.positions.index_select(0, rows)
