"""Next-token cross-entropy on responses only: the prompt is read but not learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_kl.data.chat import chat_exchange, chat_prompt
from rlhf_kl.data.texts import Example
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.text import encode
from rlhf_kl.trainers.sft import negative_log_likelihood


class ResponseObjective:
    """bos, prompt, response, eos; the response's tokens and the eos are learned.

    The prompt is tokenised alone, as in a rollout. A response too long for the context is cut. An example whose
    prompt fills the context is left out.
    """

    def __init__(
        self,
        lm: TransformersLM,
        tokenizer: Any,
        examples: Sequence[Example],
        context: int | None,
        eos_ids: Sequence[int],
        *,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        self.lm, self.tokenizer, self.eos_ids = lm, tokenizer, eos_ids
        self.chat, self.system = chat, system
        self.rows: list[list[int]] = []
        self.starts: list[int] = []  # of the response
        self.truncated = self.left_out = 0
        for example in examples:
            prompt, response = self.encode(example)
            if context is not None and len(prompt) >= context:
                self.left_out += 1
                continue
            self.truncated += context is not None and len(prompt) + len(response) > context
            self.rows.append([*prompt, *response][:context])
            self.starts.append(len(prompt))
        if not self.rows:
            raise InputError(
                f"data.texts: the prompts of all {len(examples)} rows fill the context of {context} tokens"
            )

    def encode(self, example: Example) -> tuple[list[int], list[int]]:
        """Token ids of the prompt with its bos, and of the response with its eos."""
        if self.chat:
            asked = chat_prompt(self.tokenizer, example.prompt, self.system)
            whole = chat_exchange(self.tokenizer, example.prompt, example.response, self.system)
            answered = whole if whole.startswith(asked) else asked + example.response
        else:
            asked, answered = example.prompt, example.prompt + example.response
        prompt = encode(self.tokenizer, asked)
        both = encode(self.tokenizer, answered)
        if both[: len(prompt)] == prompt:
            response = both[len(prompt) :]
        else:
            response = encode(self.tokenizer, answered[len(asked) :], bos=False)
        ends = [i for i, token in enumerate(response) if token in self.eos_ids]
        # A chat template ends a turn itself and may add a line break, which a policy need not learn.
        return prompt, response[: ends[0] + 1] if ends else [*response, self.eos_ids[0]]

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, row: int) -> int:
        """Tokens of a row."""
        return len(self.rows[row])

    def weight(self, row: int, /) -> float:
        """Learned tokens of a row."""
        return float(len(self.rows[row]) - self.starts[row])

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed negative log-likelihood of the responses in nats."""
        texts, starts = [self.rows[i] for i in rows], [self.starts[i] for i in rows]
        return negative_log_likelihood(self.lm, texts, starts)[0], {}
