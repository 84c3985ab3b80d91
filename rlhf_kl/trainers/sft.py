"""Next-token cross-entropy: pre-training from scratch and fine-tuning on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.text import encode_all
from rlhf_kl.ops.logprobs import chosen_logprobs
from rlhf_kl.ops.packing import text_layout


def negative_log_likelihood(
    lm: TransformersLM, rows: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[Tensor, int]:
    """Summed over the tokens of `rows` from `starts` (at least 1) on, in nats; and the number of these tokens."""
    layout = text_layout(rows, starts, lm.device)
    packed = layout.pack(range(len(rows)))
    ids = layout.response_ids.flatten()[packed.places]

    def nats(logits: Tensor, at: slice) -> tuple[Tensor]:
        return (-chosen_logprobs(logits, ids[at]),)

    loss: Tensor = lm.states(packed, lambda logits, _: logits.map(nats)[0].sum())
    return loss, len(ids)


class TextObjective:
    """bos, text, eos; every token after the bos is learned, the eos included."""

    def __init__(self, lm: TransformersLM, tokenizer: Any, texts: Sequence[str], context: int | None) -> None:
        self.lm = lm
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
        return negative_log_likelihood(self.lm, [self.rows[i] for i in rows], [1] * len(rows))[0], {}
