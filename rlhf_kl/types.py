"""The batches that the parts of the program exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhf_kl.ops.masked import Mean, float64, mean_of_groups
from rlhf_kl.ops.packing import CPU, Layout

Unit = Literal["token", "sequence"]
REWARD = "reward"  # the name of the scores that the policy is trained on
TERM, RAW = "terms.", "raw."  # before the name of a term: what it adds to a sum, and its own score
WATCHED = "scorers."  # before the name of a scorer that never trains

Conversation = tuple[tuple[str, str], ...]  # (role, content) of each turn
Prompt = str | Conversation  # a text is one turn of the user


@dataclass(frozen=True)
class Prompts:
    """A table of prompts: one entry of each column for each prompt. A batch is a `pick` from it."""

    texts: list[str]
    ids: list[list[int]]  # tokens as the policy reads them
    rows: list[Mapping[str, Any]]  # of the data set
    messages: list[Conversation]  # empty where the row has none
    rendered: list[str] = field(default_factory=list)  # as the chat template writes them; empty: the texts as they are

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def asked(self) -> list[Prompt]:
        """The turns of each conversation of several turns, the texts of all others."""
        return [turns if len(turns) > 1 else text for text, turns in zip(self.texts, self.messages, strict=True)]

    def pick(self, indices: Sequence[int]) -> Prompts:
        """The prompts with these indices, in this order."""
        return Prompts(*([column[i] for i in indices] if column else [] for column in vars(self).values()))


class Responses(NamedTuple):
    """Prompts with one response to each, as scorers read them."""

    prompts: Prompts
    texts: list[str]  # without special tokens
    ids: list[list[int]]  # the tokens that were sampled, EOS included
    tokenizer: Any = None  # of the policy
    known: Mapping[str, Tensor] = MappingProxyType({})  # scores (B,) that are there already, by the name of a scorer


Score = Callable[[Responses], dict[str, Tensor]]  # raw scores (B,) by name, on the CPU


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    eos_ids: list[int]
    pad_id: int


class Sampled(NamedTuple):
    """Responses, padded on the right, on the CPU."""

    ids: Tensor  # (B, T) long, EOS included
    mask: Tensor  # (B, T) bool
    ended: Tensor  # (B,) bool: the response has an EOS
    logprobs: Tensor  # (B, T) of the tokens, as they were drawn
    # (N, H) on the device, in float32 runs: hidden states that the N tokens were drawn from, row by row
    states: Tensor | None = None

    def pick(self, rows: slice) -> Sampled:
        """Some of the responses, without states."""
        return Sampled(self.ids[rows], self.mask[rows], self.ended[rows], self.logprobs[rows])

    def rows(self) -> list[list[int]]:
        """The tokens of each response."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.mask.sum(1).tolist(), strict=True)]


@dataclass(frozen=True)
class RolloutBatch:
    """Responses of one policy with everything that PPO needs to know about them, on the CPU; never mutated.

    After a rollout it is the batch of all processes, where each of them computes the same numbers from it.
    """

    prompt_ids: Tensor  # (B, P) long, left-padded
    prompt_mask: Tensor  # (B, P) bool
    response_ids: Tensor  # (B, T) long, EOS included, padded on the right
    mask: Tensor  # (B, T) bool, True = a token the policy chose
    logprobs: Tensor  # (B, T) of the policy that sampled
    ref_logprobs: Tensor  # (B, T)
    exact_kl: Tensor  # (B, T) nats, over the whole vocabulary
    entropy: Tensor  # (B, T) nats
    k1_variance: Tensor  # (B, T) nats squared, of log pi - log ref over the vocabulary
    logprob_variance: Tensor  # (B, T) the same of log pi
    values: Tensor  # (B, T) of the state before each token
    drawn: Tensor  # (B, T) log-probs with which the sampler drew the tokens
    # (B,) of a function in float64; NaN = not scored: "reward"; of a sum what each "terms.NAME" adds to it, and its own
    # score "raw.NAME"
    scores: dict[str, Tensor]
    shaped_scores: Tensor  # (B,) normalised, clipped, minus penalties; 0 if not scored
    ended: Tensor  # (B,) bool, True = the response has an EOS
    prompts: list[str]  # B texts
    responses: list[str]  # B texts, without special tokens
    penalties: dict[str, Tensor] = field(default_factory=dict)  # subtracted from the score: (B,) by name
    rows: list[Mapping[str, Any]] = field(default_factory=list)  # of the data set: the prompts'
    group: int = 1  # neighbours with the same prompt
    device: torch.device = CPU  # of forward passes
    begin: int = 0  # the first row whose states this process holds

    def __len__(self) -> int:
        return len(self.response_ids)

    def mean(self, x: Tensor, unit: Unit = "token", rows: Sequence[int] | slice = slice(None)) -> Mean:
        """Mean of `x` (B, T) over all tokens, or of its sums over responses; prompts are the independent draws.

        `rows`: of all responses to some prompts; default: the batch.
        """
        sums = float64(torch.where(self.mask, x, 0.0)).sum(1)
        sizes = self.lengths if unit == "token" else torch.ones_like(sums)
        return mean_of_groups(sums[rows], sizes[rows], self.group)

    def kl(self, unit: Unit) -> Mean:
        """Mean exact KL in nats per token or per response: what is controlled, held below a ceiling and logged."""
        return self._kls[unit]

    @cached_property
    def _kls(self) -> dict[Unit, Mean]:
        return {unit: self.mean(self.exact_kl, unit) for unit in get_args(Unit)}

    def score(self) -> Mean:
        """Mean shaped score of the responses that have one."""
        scores = torch.where(self.scored, self.shaped_scores, 0.0)
        return mean_of_groups(float64(scores), float64(self.scored), self.group)

    def score_spread(self) -> float:
        """Standard deviation of the shaped scores over the responses that have one."""
        return float(float64(self.shaped_scores)[self.scored].std(correction=0))

    @classmethod
    def concat(cls, parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """The rows of several batches; prompts are padded on the left, responses on the right."""
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            if isinstance(values[0], list):
                columns[column.name] = [text for value in values for text in value]
            elif isinstance(values[0], dict):
                columns[column.name] = {name: torch.cat([value[name] for value in values]) for name in values[0]}
            elif isinstance(values[0], Tensor):
                columns[column.name] = torch.cat(_padded(values, left=column.name.startswith("prompt_")))
            else:
                columns[column.name] = values[0]
        return cls(**columns)

    @cached_property
    def scored(self) -> Tensor:
        """Whether each response has a score: (B,) bool."""
        return ~self.scores[REWARD].isnan()

    @property
    def weights(self) -> Tensor:
        """Weight (B, T) of each token in the losses: 0 outside of the mask and in responses without a score."""
        return (self.mask & self.scored.unsqueeze(1)).to(self.logprobs.dtype)

    def tokens_per(self, unit: Unit) -> float:
        """Mean number of tokens in a unit."""
        return 1.0 if unit == "token" else int(self.mask.sum()) / len(self)

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each response, EOS included: (B,)."""
        return self.mask.sum(1)

    @property
    def input_ids(self) -> Tensor:
        """Prompt and response: (B, P + T)."""
        return torch.cat([self.prompt_ids, self.response_ids], 1)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the rows for forward passes."""
        return Layout(
            self.input_ids, self.prompt_ids.shape[1], self.prompt_mask.sum(1), self.lengths, self.device, self.begin
        )


def _padded(parts: Sequence[Tensor], *, left: bool, fill: int = 0) -> list[Tensor]:
    """Tensors (B, L) with the same number of columns; those (B,) as they are."""
    if parts[0].dim() == 1:
        return list(parts)
    width = max(part.shape[1] for part in parts)
    gaps = [(width - part.shape[1], 0) if left else (0, width - part.shape[1]) for part in parts]
    return [torch.nn.functional.pad(part, gap, value=fill) for part, gap in zip(parts, gaps, strict=True)]
