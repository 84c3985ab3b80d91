"""Next-token cross-entropy on texts: pre-training from scratch and fine-tuning alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_kl.models.actor_critic import position_ids
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.ops.logprobs import chosen_logprobs
from rlhf_kl.ops.masked import masked_sum


class TextObjective:
    """bos, text, eos; every token after the bos is learned, the eos included."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str], context: int | None) -> None:
        self.model, self.pad_id = model, tokenizer.pad_token_id
        rows = encode_all(tokenizer, texts)
        self.rows = [[*row, tokenizer.eos_token_id][:context] for row in rows]
        self.truncated = sum(context is not None and len(row) + 1 > context for row in rows)

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, row: int) -> int:
        """Tokens of a row."""
        return len(self.rows[row])

    def weight(self, row: int, /) -> float:
        """Learned tokens of a row."""
        return float(len(self.rows[row]) - 1)

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed negative log-likelihood in nats."""
        device = next(self.model.parameters()).device
        ids, mask = pad([self.rows[i] for i in rows], self.pad_id, left=False)
        ids, mask = ids.to(device), mask.to(device)
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False
        ).logits[:, :-1]
        return masked_sum(-chosen_logprobs(logits, ids[:, 1:]), mask[:, 1:]), {}
