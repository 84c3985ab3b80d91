"""The scorers of a run: the reward that the policy is trained on, the terms of a sum, and those that never train.

Scores are (B,) on the CPU. NaN = the scorer gave none for this response; inf = a reward model's score was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError, ServiceFailed, blame
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.shaping import scale_of
from rlhf_kl.sharding import has_shards, layer_by_layer
from rlhf_kl.types import RAW, REWARD, TERM, WATCHED, Prompts, Responses
from rlhf_kl.ui import log

CANCELLED = 1e-6  # of the weights: less spread of a sum of scaled terms is rounding


@dataclass(frozen=True)
class Scorer:
    """A reward model, or a user's function."""

    name: str  # "reward", "terms.NAME", or of one that never trains "scorers.NAME"
    call: Callable[[Responses], Tensor]
    weight: float = 1.0
    mean: float = 0.0  # of a term, taken off its score
    std: float = 1.0  # and divided by, before its weight

    @property
    def key(self) -> str:
        """Its config key."""
        return self.name if self.name == REWARD else f"{'eval' if self.never_trains else REWARD}.{self.name}"

    @property
    def never_trains(self) -> bool:
        return self.name.startswith(WATCHED)

    def scores(self, responses: Responses) -> Tensor:
        """Raw scores (B,): those that are known, else by a call."""
        return responses.known[self.name] if self.name in responses.known else self.call(responses)


class Scorers:
    """All scorers of a run."""

    def __init__(self, *scorers: Scorer) -> None:
        self.scorers = scorers
        self.failed = set[str]()  # names of those of weight 0 whose failure was told

    def __call__(self, responses: Responses) -> dict[str, Tensor]:
        """Raw scores (B,) by name: "reward", and for a sum what `add_up` gives; nothing without a reward.

        A term that does not score a response adds nothing; one of weight 0 may fail. Errors: InputError or
        ServiceFailed, by the config key of a scorer.
        """
        values: dict[str, Tensor] = {}
        for scorer in self.scorers:
            if scorer.never_trains:
                continue
            try:
                with blame(scorer.key):
                    values[scorer.name] = scorer.scores(responses)
            except (InputError, ServiceFailed) as error:
                if scorer.weight:
                    raise
                values[scorer.name] = torch.full((len(responses.texts),), math.nan)
                if scorer.name not in self.failed:
                    log.warning(f"{error}: of weight 0, it goes on without")
                self.failed.add(scorer.name)
        return values | self.add_up({name: values[term.name] for name, term in self.terms.items()})

    def judge(self, responses: Responses, failures: dict[str, str]) -> dict[str, list[float]]:
        """Scores (B,) of "reward", and by NAME those of the scorers that never train; NaN = none.

        `failures`: by NAME, what went wrong with one; it is not called again. Errors: as those of a call.
        """
        values = {name: scores.tolist() for name, scores in self(responses).items() if name == REWARD}
        for scorer in self.watched.scorers:
            name = scorer.name.removeprefix(WATCHED)
            values[name] = [math.nan] * len(responses.texts)
            if name not in failures:
                try:
                    scores = scorer.scores(responses)
                    if bool(scores.isinf().any()):
                        raise InputError("a score is not a finite number")
                    values[name] = scores.tolist()
                except (InputError, ServiceFailed) as error:
                    failures[name] = str(error)
        return values

    def together(self, batches: Sequence[Responses]) -> list[Responses]:
        """Responses with their scores by the reward models whose weights are sharded.

        All processes call it together, not inside of `Ranks.run`: they gather the layers of these models in turn.
        Errors: InputError from a model.
        """
        found = list(batches)
        for name, model in self.models.items():
            if has_shards(model.model):
                texts = [text for each in found for text in each.texts]
                with layer_by_layer(model.model):
                    scores = model.score([asked for each in found for asked in each.prompts.asked], texts)
                own = scores.split([len(each.texts) for each in found])
                found = [each._replace(known={**each.known, name: x}) for each, x in zip(found, own, strict=True)]
        return found

    # ---- the terms of a sum

    @property
    def terms(self) -> dict[str, Scorer]:
        """The terms of a sum, by NAME."""
        return {each.name.removeprefix(TERM): each for each in self.scorers if each.name.startswith(TERM)}

    def add_up(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From the raw scores (B,) of terms, by NAME: "reward", what each "terms.NAME" adds to it, and "raw.NAME".

        Empty without terms.
        """
        terms = {name: self.terms[name] for name in raw}
        adds = {name: term.weight * (raw[name].double() - term.mean) / term.std for name, term in terms.items()}
        total = {REWARD: _sum([adds[name] for name, term in terms.items() if term.weight])} if terms else {}
        return total | {TERM + name: x for name, x in adds.items()} | {RAW + name: x for name, x in raw.items()}

    def scale(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Centre and scale each term with a weight by its "mean" and "std", by NAME."""
        found = {TERM + name: {key: of[key] for key in ("mean", "std")} for name, of in figures.items()}
        self.scorers = tuple(replace(each, **found.get(each.name, {}) if each.weight else {}) for each in self.scorers)

    def fit(self, raw: Mapping[str, Tensor]) -> None:
        """Scale the terms by their scores (N,) of reference samples: `reward.normalize: each`.

        Errors: InputError for a term without a scale, and for terms that cancel each other.
        """
        change = "If the policy can find other scores, set reward.normalize=true; else leave the term out"
        terms = {name: term for name, term in self.terms.items() if term.weight}
        self.scale({name: scale_of(raw[name], term.key, change) for name, term in terms.items()})
        spread = float(self.add_up(raw)[REWARD].std(correction=0))
        if not spread > CANCELLED * sum(abs(term.weight) for term in terms.values()):
            raise InputError("reward: the weighted terms cancel each other in all reference samples. Change a weight")

    @property
    def trained(self) -> Scorers:
        """Those that the policy is trained on."""
        return Scorers(*(scorer for scorer in self.scorers if not scorer.never_trains))

    @property
    def watched(self) -> Scorers:
        """Those that never train."""
        return Scorers(*(scorer for scorer in self.scorers if scorer.never_trains))

    @property
    def model(self) -> RewardModel | None:
        """The reward model, if it alone is the reward."""
        return self.models.get(REWARD)

    @cached_property
    def models(self) -> dict[str, RewardModel]:
        """The reward models, by the names of their scorers."""
        return {scorer.name: scorer.call for scorer in self.scorers if isinstance(scorer.call, RewardModel)}

    @cached_property
    def _functions(self) -> list[tuple[Scorer, PluginReward]]:
        """The scorers that are functions of the user's, and the functions."""
        return [(scorer, scorer.call) for scorer in self.scorers if isinstance(scorer.call, PluginReward)]

    # ---- columns of the data set

    def columns_of(self, prompts: Prompts) -> list[dict[str, list[Any]]]:
        """The columns that each function reads. Errors: InputError if a prompt lacks one."""
        columns = []
        for scorer, function in self._functions:
            with blame(scorer.key):
                columns.append(function.columns_of(prompts))
        return columns

    @property
    def column_names(self) -> list[str]:
        """The columns that the functions name, required or optional."""
        return list(dict.fromkeys(name for _, function in self._functions for name in function.named))

    # ---- what functions log, as in TRL

    def begin(self, update: int, updates: int) -> None:
        """Start update number `update` (from 1) of `updates`; clears what functions logged."""
        for _, function in self._functions:
            function.begin(update, updates)

    def logged_metrics(self) -> dict[str, list[float]]:
        """Values that functions logged since the update began, by their key in the row."""
        values: dict[str, list[float]] = {}
        for _, function in self._functions:
            for name, logged in function.logged.items():
                values.setdefault(f"log/{name}", []).extend(logged)
        return values

    def logged_columns(self, responses: int) -> dict[str, list[str]]:
        """Columns that functions logged: one value per response of the update. Other lengths are left out."""
        logged = [pair for _, function in self._functions for pair in function.extra.items()]
        return {name: values for name, values in logged if len(values) == responses}

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The states of the user's objects, by name.

        Errors: InputError if a state cannot be read, or if JSON cannot restore it exactly.
        """
        states = {}
        for scorer, function in self._functions:
            if function.has_state:
                with blame(scorer.key):
                    states[scorer.name] = function.state_dict()
        return states

    @property
    def with_state(self) -> list[str]:
        """The config keys of the functions that have a state."""
        return [scorer.key for scorer, function in self._functions if function.has_state]

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the states; an object that has none there begins anew. Errors: InputError if one cannot."""
        for scorer, function in self._functions:
            if scorer.name in states and function.has_state:
                with blame(scorer.key):
                    function.load_state_dict(states[scorer.name])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore their states afterwards: an evaluation does not change a run."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum (B,) float64 of what terms add; NaN where none of them scores."""
    scored = torch.stack([~term.isnan() for term in terms]).any(0)
    total = sum((torch.where(term.isnan(), 0.0, term) for term in terms), torch.zeros(()).double())
    total = torch.where(total.isnan(), math.inf, total)  # inf - inf
    return torch.where(scored, total, math.nan)


def mean_metrics(logged: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """Metrics that the functions of all processes logged: the mean of all values, by name."""
    names = dict.fromkeys(name for each in logged for name in each)
    return {name: fmean(value for each in logged for value in each.get(name, ())) for name in names}
