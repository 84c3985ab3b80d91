"""Reward functions: a user's own, weighted sums, and the checks around functions that may misbehave."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.memory import memory_is_full
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.time_limit import TimeLimited, TimeLimitExceeded
from rlhf_kl.types import RewardFn

GoldScorer = Callable[[Sequence[str], Sequence[str]], list[float]]


@dataclass(frozen=True)
class WeightedSum:
    """Several reward functions as one: the sum of their raw scores, each times its weight."""

    terms: dict[str, tuple[float, RewardFn]]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score per response."""
        return self.score(prompts, responses)[0].tolist()

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores (B,), and what each term adds to them: (B,) by name, its weight included."""
        parts = {
            name: weight * checked_scores(reward, prompts, responses, name).double()
            for name, (weight, reward) in self.terms.items()
        }
        total = sum(parts.values(), torch.zeros(len(responses), dtype=torch.float64)).float()
        if not bool(torch.isfinite(total).all()):
            sizes = ", ".join(f"{name} {float(part.abs().max()):g}" for name, part in parts.items())
            raise InputError(f"reward sum: beyond the range of float32; the largest of its terms: {sizes}")
        return total, parts


def score_responses(
    reward: RewardFn, prompts: Sequence[str], responses: Sequence[str], name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Raw scores (B,), and of a sum what each term adds to them.

    A model's may be anything; a function's are checked (errors: InputError, see `checked_scores`).
    """
    if isinstance(reward, RewardModel):
        return reward.score(prompts, responses), {}
    if isinstance(reward, WeightedSum):
        return reward.score(prompts, responses)
    return checked_scores(reward, prompts, responses, name), {}


def bind_reward(attribute: Any, options: dict[str, Any], time_limit: float | None = None) -> RewardFn:
    """A user's function with its options, or an instance of a user's class made with them.

    time_limit: seconds that a call may take; None = any. Errors: InputError where the instance cannot be made.
    """
    bound = cast(RewardFn, _made(attribute, options) if inspect.isclass(attribute) else partial(attribute, **options))
    return bound if time_limit is None else cast(RewardFn, TimeLimited(bound, time_limit))


def _made(cls: type, options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # an exit code of the class's would pass for one of ours
        raise InputError(f"reward {cls.__name__}: cannot be made: raised {type(error).__name__}: {error}") from error


def checked_scores(
    reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str], name: str
) -> Tensor:
    """Scores (B,) float32 of a reward function that may misbehave.

    Errors: InputError that names the function, what it did and the sample it did it on; memory that is full is no
    fault of the function's.
    """
    try:
        answer = reward(prompts, responses)
        returned = list(answer) if hasattr(answer, "__iter__") else None  # a generator runs once, here
    except InputError:
        raise
    except TimeLimitExceeded as error:
        raise InputError(f"reward {name}: {error} (reward.time_limit) on {_batch_words(responses)}") from error
    except (Exception, SystemExit) as error:
        if memory_is_full(error):
            raise
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
        except (Exception, SystemExit):
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


def gold_scores_of(gold: GoldScorer | None, prompts: Sequence[str], responses: Sequence[str]) -> list[float] | None:
    """Checked scores of the gold scorer, None where there is none."""
    return None if gold is None else checked_scores(gold, prompts, responses, "gold").tolist()
