"""Scores for responses, and how a raw score becomes what PPO sees."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.models.load import context_length
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.time_limit import TimeLimited, TimeLimitExceeded
from rlhf_kl.types import RewardFn

GoldScorer = Callable[[Sequence[str], Sequence[str]], list[float]]
SCORING_ROWS = 64  # texts in one forward pass of a reward model


class RewardModel:
    """A sequence classifier as a reward function; texts are re-encoded with its own tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, rows: int = SCORING_ROWS) -> None:
        self.model, self.tokenizer, self.rows = model, tokenizer, rows
        # The classifier reads the last token that is not the pad id: it must be a real token, the EOS.
        self.model.config.pad_token_id = tokenizer.pad_token_id
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise InputError("reward.model: its pad token is its eos token, so the EOS would never be scored")
        self.limit = context_length(model)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score per response, in the model's own unit."""
        return self.score(prompts, responses).tolist()

    @torch.no_grad()
    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """Scores (B,) float32 on the CPU."""
        rows = self.encode(prompts, responses)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # near-equal lengths pad little
        scores = torch.zeros(len(rows))
        for start in range(0, len(order), self.rows):
            picked = order[start : start + self.rows]
            scores[picked] = self.forward([rows[i] for i in picked]).float().cpu()
        return scores

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> list[list[int]]:
        """bos, prompt, response, eos; a text longer than the context loses its beginning."""
        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        end = [self.tokenizer.eos_token_id]
        rows = [[*ids, *end] for ids in encode_all(self.tokenizer, texts)]
        return rows if self.limit is None else [row[-self.limit :] for row in rows]

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores (B,) of encoded texts, with gradients where they are on."""
        ids, mask = pad(rows, self.tokenizer.pad_token_id, left=False)
        device = next(self.model.parameters()).device
        logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0]


def bind_reward(attribute: Any, options: dict[str, Any], time_limit: float | None = None) -> RewardFn:
    """A user's function with its options, or an instance of a user's class made with them.

    time_limit: seconds that a call may take; None = any.
    """
    bound = cast(RewardFn, attribute(**options) if inspect.isclass(attribute) else partial(attribute, **options))
    return bound if time_limit is None else cast(RewardFn, TimeLimited(bound, time_limit))


def checked_scores(
    reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str], name: str
) -> Tensor:
    """Scores (B,) float32 of a reward function that may misbehave.

    Errors: InputError that names the function, what it did and the sample it did it on.
    """
    try:
        answer = reward(prompts, responses)
        returned = list(answer) if hasattr(answer, "__iter__") else None  # a generator runs once, here
    except InputError:
        raise
    except TimeLimitExceeded as error:
        raise InputError(f"reward {name}: {error} (reward.time_limit) on {_batch_words(responses)}") from error
    except Exception as error:
        culprit = _culprit(reward, prompts, responses)
        raise InputError(f"reward {name}: raised {type(error).__name__}: {error} on {culprit}") from error
    if returned is None:
        kind = type(answer).__name__
        raise InputError(f"reward {name}: returned {kind}, not one number per response, on {_batch_words(responses)}")
    scores = [_number(score) for score in returned]
    if len(scores) != len(responses):
        raise InputError(f"reward {name}: returned {len(scores)} scores for {_batch_words(responses)}")
    for score, raw, response in zip(scores, returned, responses, strict=True):
        if score is None or not math.isfinite(score):
            raise InputError(f"reward {name}: the score of {response[:60]!r} is {raw!r}, not a finite number")
    return torch.tensor(scores, dtype=torch.float32)


def _batch_words(responses: Sequence[str]) -> str:
    return f"{len(responses)} responses, the first of them {responses[0][:60]!r}"


def _culprit(reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str]) -> str:
    """The first sample that raises by itself; the whole batch where none does."""
    for prompt, response in zip(prompts, responses, strict=True):
        try:
            answer = reward([prompt], [response])
            list(answer)
        except Exception:
            return f"the response {response[:60]!r} to the prompt {prompt[:60]!r}"
    return _batch_words(responses)


def _number(score: Any) -> float | None:
    """As float32 would hold it; None where it is no single number."""
    if isinstance(score, bool | str) or not hasattr(score, "__float__"):
        return None
    try:
        return float(torch.tensor(float(score), dtype=torch.float32))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a row of several numbers
        return None


@dataclass(frozen=True)
class ScoreShaping:
    """Raw score -> normalised on reference samples, clipped, less the penalty for a missing EOS.

    Source: Ziegler et al. 2019, section 2.1 (normalisation on reference samples).
    """

    mean: float = 0.0
    std: float = 1.0
    clip: float | None = None
    missing_eos_penalty: float = 0.0

    @classmethod
    def fit(cls, scores: Tensor, *, normalize: bool, clip: float | None, missing_eos_penalty: float) -> ScoreShaping:
        """From raw scores (N,) of reference samples. Errors: InputError where all scores are the same."""
        std = float(scores.std(correction=0))
        if not std > 1e-8 * max(1.0, float(scores.abs().max())):
            raise InputError(
                f"reward: every one of {len(scores)} reference samples scores {float(scores[0]):g}: "
                "a constant score teaches nothing"
            )
        if not normalize:
            return cls(clip=clip, missing_eos_penalty=missing_eos_penalty)
        return cls(float(scores.mean()), std, clip, missing_eos_penalty)

    def __call__(self, scores: Tensor, ended: Tensor) -> Tensor:
        """Raw scores (B,) and whether each response ended (B,) -> shaped scores (B,)."""
        shaped = (scores - self.mean) / self.std
        if self.clip is not None:
            shaped = shaped.clamp(-self.clip, self.clip)
        return shaped - self.missing_eos_penalty * (~ended).to(shaped)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to shape scores as before."""
        return asdict(self)


def gold_scores_of(gold: GoldScorer | None, prompts: Sequence[str], responses: Sequence[str]) -> list[float] | None:
    """Checked scores of the gold scorer, None where there is none."""
    return None if gold is None else checked_scores(gold, prompts, responses, "gold").tolist()
