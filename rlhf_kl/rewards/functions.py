"""Reward functions: a user's own, weighted sums, and the checks of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.hub import first_line
from rlhf_kl.memory import memory_is_full
from rlhf_kl.plugins import hidden, users_code
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.time_limit import TimeLimitExceeded
from rlhf_kl.types import RewardFn

GoldScorer = Callable[[Sequence[str], Sequence[str]], list[float]]
GOLD_FAILED = "gold-failed"  # keyword of its alert


class Scores(NamedTuple):
    """Raw scores of one batch."""

    values: Tensor  # (B,), 0 if not scored; those of a reward model are not checked
    scored: Tensor  # (B,) bool: False where a function returned None
    terms: dict[str, Tensor]  # of a sum, what each term adds: (B,) by name, nan where it does not score


@dataclass(frozen=True)
class WeightedSum:
    """Several reward functions as one: the sum of their raw scores, each times its weight.

    A term that does not score a response adds nothing. A response that no term scores is not scored.
    """

    terms: dict[str, tuple[float, RewardFn]]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
        """One score per response."""
        scores = self.score(prompts, responses)
        pairs = zip(scores.values.tolist(), scores.scored.tolist(), strict=True)
        return [value if scored else None for value, scored in pairs]

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Scores:
        """Scores, and what each term adds to them, its weight included.

        Not finite if a reward model's scores are not. Errors: InputError, see `checked_scores`.
        """
        found = {name: score_responses(reward, prompts, responses, name) for name, (_, reward) in self.terms.items()}
        parts = {name: weight * found[name].values.cpu().double() for name, (weight, _) in self.terms.items()}
        known = {name: scores.scored.cpu() for name, scores in found.items()}
        scored = torch.stack(list(known.values())).any(0)
        exact = sum(parts.values(), torch.zeros(len(responses), dtype=torch.float64))
        total = exact.float()
        if bool((torch.isfinite(exact) & ~torch.isfinite(total)).any()):
            sizes = ", ".join(f"{name} {float(part.abs().max()):g}" for name, part in parts.items())
            raise InputError(f"reward sum: beyond the range of float32; largest absolute value of each term: {sizes}")
        return Scores(total, scored, {name: torch.where(known[name], part, math.nan) for name, part in parts.items()})


def score_responses(reward: RewardFn, prompts: Sequence[str], responses: Sequence[str], name: str) -> Scores:
    """Raw scores. Only those of a function are checked (errors: InputError, see `checked_scores`)."""
    if isinstance(reward, WeightedSum):
        return reward.score(prompts, responses)
    if isinstance(reward, RewardModel):
        values = reward.score(prompts, responses)
        return Scores(values, torch.ones(len(responses), dtype=torch.bool), {})
    values = checked_scores(reward, prompts, responses, name)
    scored = ~values.isnan()
    return Scores(torch.where(scored, values, 0.0), scored, {})


def checked_scores(
    reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str], name: str
) -> Tensor:
    """Checked scores (B,) float32 of a reward function; nan if it returned None: not scored.

    Errors: InputError that names the function and its fault: the line that raised, or the sample. Full memory is not a
    fault of the function.
    """
    batch = f"{len(responses)} responses, the first of them {responses[0][:60]!r}"
    try:
        with users_code(f"reward {name}: raised"):
            answer = reward(prompts, responses)
            returned = list(answer) if hasattr(answer, "__iter__") else None  # a generator runs once, here
    except TimeLimitExceeded as error:
        raise InputError(f"reward {name}: {error} (reward.time_limit) on {batch}") from error
    if returned is None:
        kind = type(answer).__name__
        raise InputError(f"reward {name}: returned {kind}, not one number per response, on {batch}")
    scores = [math.nan if score is None else _number(score) for score in returned]
    if len(scores) != len(responses):
        raise InputError(f"reward {name}: returned {len(scores)} scores for {batch}")
    for score, raw, response in zip(scores, returned, responses, strict=True):
        if raw is not None and (score is None or not math.isfinite(score)):
            shown = hidden(repr(raw))
            raise InputError(f"reward {name}: the score of {response[:60]!r} is {shown}, not a finite number")
    return torch.tensor(scores, dtype=torch.float32)


def _number(score: Any) -> float | None:
    """The number as float32; None if it is not a single number."""
    if isinstance(score, bool | str) or not hasattr(score, "__float__"):
        return None
    try:
        return float(torch.tensor(float(score), dtype=torch.float32))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a row of several numbers
        return None


class GoldScores(NamedTuple):
    """Gold scores of one batch. They are only logged, so a failure does not stop the run."""

    scores: list[float | None] | None  # None if there is no gold scorer, or if it failed
    failure: str | None = None

    @property
    def mean(self) -> float | None:
        """Mean over the scored responses."""
        known = [score for score in self.scores or [] if score is not None]
        return sum(known) / len(known) if known else None


def gold_scores_of(gold: GoldScorer | None, prompts: Sequence[str], responses: Sequence[str]) -> GoldScores:
    """Checked scores of the gold scorer, or its failure."""
    if gold is None:
        return GoldScores(None)
    try:
        scores: list[float] = checked_scores(gold, prompts, responses, "gold").tolist()
        return GoldScores([None if math.isnan(score) else score for score in scores])
    except InputError as error:
        return GoldScores(None, str(error))
    except Exception as error:
        if not memory_is_full(error):
            raise
        return GoldScores(None, f"reward gold: memory is full: {first_line(error)}")


def joined_gold(parts: Sequence[GoldScores]) -> GoldScores:
    """The scores of several processes, or the first failure."""
    failure = next((part.failure for part in parts if part.failure is not None), None)
    scores = [part.scores for part in parts if part.scores is not None]
    whole = len(scores) == len(parts)
    return GoldScores([score for each in scores for score in each] if whole else None, failure)
