"""The section `reward`: one scorer, or a sum of several."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rlhf_kl.config.schema.sections import (
    Name,
    NonNegative,
    OptionalSource,
    Plugin,
    Positive,
    Section,
    refuse,
    unread,
)
from rlhf_kl.errors import nearest, suggestion
from rlhf_kl.plugins import checked_options, is_reference, missing_variables
from rlhf_kl.remote import HttpReward

SUM = "sum"  # the reward that is made of several
EACH: Literal["each"] = "each"  # of its terms is normalised
SERVERS = {"http": HttpReward}  # rewards behind a URL
MODEL_KEYS = ("model", "label", "text_pair", "chat_template", "append_eos")
MODEL = "a local folder, a hub id (owner/name@revision), or builtin:NAME"


class ScorerSection(Section):
    """One scorer: a model, or a server or function whose options stand beside its kind."""

    model_config = ConfigDict(extra="allow")
    named: ClassVar[tuple[str, ...]] = ("model", *SERVERS)  # the kinds that are no function

    kind: Plugin = "model"
    """model, http (a server), or a function as file.py:function or module:function; options stand beside this key."""
    model: OptionalSource = None
    """Reward model, where kind is model: a local folder, a hub id (owner/name@revision), or builtin:NAME.

    Default: the reward model of the built-in policy.
    """
    label: Name | None = None
    """Output of a classifier with several. Its log-odds against the others are the score.

    Of a multi-label or regression model (problem_type in its config) the output itself is.
    """
    text_pair: bool | None = None
    """The classifier reads prompt and response as a pair of texts, in its tokenizer's pair form; null = as one text."""
    chat_template: bool | None = None
    """Format prompt and response with the reward model's chat template; null = as stored in its folder, else false."""
    append_eos: bool | None = None
    """End the text of a decoder with its EOS, without a chat template; null = as stored in its folder, else true."""
    interface: Literal["trl"] | None = None
    """How a function is called: null = f(prompts, responses, and the columns that it names); trl = as in TRL."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of a reward function or a server."""
        return dict(self.model_extra or {})

    def problems(self, path: str) -> list[str]:
        """Problems of keys that do not go with the kind; `path` is the dotted key of this scorer."""
        named = self.kind in self.named
        if not named and not is_reference(self.kind):
            hint = f"; did you mean {close}?" if (close := nearest(self.kind, self.named)) else ""
            kinds = ", ".join(self.named)
            return [f"{path}.kind must be {kinds}, file.py:function or module:function: {self.kind!r}{hint}"]
        found = list[str]()
        if self.kind in SERVERS:
            unset = missing_variables(self.options, path)  # refused where they are used
            wrong = checked_options(SERVERS[self.kind], self.options, path)[1]
            found += [line for line in wrong if line not in unset]
        elif named:
            fields = type(self).model_fields
            found += [f"{path}.{key}: unknown key{suggestion(key, fields, f'{path}.')}" for key in self.options]
        if named:
            found += unread(self, path, ("interface",), f"{path}.kind is a function")
        if self.kind == "model" and not self.model:
            found.append(f"{path}.model is missing: {MODEL}; or name a function as {path}.kind")
        if self.kind != "model":
            found += unread(self, path, MODEL_KEYS, f"{path}.kind is model")
        elif self.chat_template:
            found += unread(self, path, ("text_pair", "append_eos"), f"{path}.chat_template is false")
        elif self.text_pair:
            found += unread(self, path, ("append_eos",), f"{path}.text_pair is false")
        return found


class TermSection(ScorerSection):
    weight: float = 1.0
    """Weight of the term's score in the sum; 0 = it is only logged."""


class RewardSection(ScorerSection):
    named = ("model", *SERVERS, SUM)
    kind: Plugin = "model"
    """model, http (a server) or a function as file.py:function or module:function, with options beside it, or sum."""
    terms: dict[Name, TermSection] | None = None
    """Where kind is sum: scorers by name, each with its kind and weight; their scores are added up."""
    normalize: bool | Literal["each"] = True
    """Normalise scores: mean 0 and standard deviation 1 on responses of the reference, measured once.

    each: first every term of a sum by itself, before its weight, so that the widest one does not win; then the sum.
    """
    clip: Positive | None = 5.0
    """Limit of the absolute value of a score, normalised or not; null = none."""
    missing_eos_penalty: NonNegative = 1.0
    """Subtracted from the score of a response that was cut off."""
    length_penalty: NonNegative = 0.0
    """Subtracted from the score for every token of the response."""
    repetition_penalty: NonNegative = 0.0
    """Subtracted from the score, times the share of the response's three-token runs that are repetitions."""
    time_limit: Positive | None = None
    """Seconds that a function may take per batch, one of eval.scorers too; null = no limit.

    With a limit it runs in a separate thread.
    """
    gold: Name | None = Field(default=None, exclude=True)
    """Another way to write the scorer `gold` of eval.scorers: a model or a function."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = self.problems("reward")
        if self.kind != SUM and self.terms is not None:
            problems.append("reward.terms is only read where reward.kind is sum")
        elif self.kind == SUM and not self.terms:
            problems.append("reward.terms must name at least one scorer where reward.kind is sum")
        elif self.terms:
            problems += [line for name, term in self.terms.items() for line in term.problems(f"reward.terms.{name}")]
        if self.normalize == EACH and self.kind != SUM:
            problems.append("reward.normalize: each is for reward.kind sum: true scales a single reward")
        elif self.terms and not any(term.weight for term in self.terms.values()):
            problems.append("reward.terms must have one with a weight that is not 0")
        refuse(*problems)
        return self
