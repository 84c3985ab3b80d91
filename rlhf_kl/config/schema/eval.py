"""The section `eval` of `train`: held-out texts and prompts, and the scorers that never train."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhf_kl.builtin.world import GOLD, is_builtin
from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.config.schema.sections import Count, Name, OptionalSource, Section, Source, inner, refuse
from rlhf_kl.plugins import is_reference

# What else stands beside a scorer's figure, in rows, JSON documents and samples: no scorer may have such a name.
TAKEN = frozenset((
    "beta", "bits_per_byte", "bytes", "chosen", "columns", "distinct_2", "documents", "ended", "eos_rate", "episodes",
    "error_since", "figures", "forward_kl_token", "kl", "kl_by_token", "kl_sequence", "kl_token", "length",
    "nats_per_token", "of", "peak", "perplexity", "perplexity_cost", "prompt", "prompts", "reference", "response",
    "responses", "reward", "run", "scale", "score", "score_mean", "scores", "scores_shaped", "signs", "since", "status",
    "step", "tail_error", "target", "text", "texts", "time_in_band", "tokens", "unit", "unscored", "updates", "verdict",
))  # fmt: skip
DERIVED = re.compile(r"reference_.*|.*_(stderr|gain)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def scorer_names(keys: Iterable[str]) -> list[str]:
    """Those of the keys that are names of scorers."""
    return [key for key in keys if key not in TAKEN and not DERIVED.fullmatch(key)]


def with_gold(raw: dict[str, Any]) -> None:
    """Add the scorer `gold` to a mapping: that of `reward.gold`, else the truth of the built-in world.

    A world brings it where its reward model or its prompts are used. Errors: InputError where gold is written twice.
    """
    reward, scorers = inner(raw, "reward"), inner(raw, "eval").setdefault("scorers", {})
    written, world = reward.get("gold"), (reward.get("model"), inner(raw, "data").get("prompts"))
    if not isinstance(scorers, dict):
        return
    if isinstance(written, str):
        if "gold" in scorers:
            refuse("reward.gold is another way to write eval.scorers.gold, which is written too: leave it out")
        key = "kind" if is_builtin(written) or is_reference(written) else "model"
        scorers["gold"] = {key: GOLD if is_builtin(written) else written}
    elif any(map(is_builtin, world)):
        scorers.setdefault("gold", {"kind": GOLD})


# What `auto` stands for: the seven evaluations of 60 updates of 32 responses take at most 15 % of the run's time.
EVERY = 10
RESPONSES = 24
MOST_TEXTS = 200


class EvalSection(Section):
    every: Count | Literal["auto"] = "auto"
    """Updates between two evaluations; the first is before the first update, the last after the last one. auto = 10.

    With the default sizes they take at most 15 % of the time of 60 updates of 32 responses.
    """
    texts: Source
    """Held-out texts for the perplexity: .jsonl .json .csv .parquet .txt, a hub id, or builtin:NAME.

    Default: the texts of the built-in policy.
    """
    column: Name = "text"
    """Column or key of the text."""
    prompts: OptionalSource = None
    """Held-out prompts to score, with the same columns as data.prompts; null = those that come with a
    built-in world, else one in twenty of data.prompts.
    """
    split: Name = "test"
    """Split of a hub id, folder or file in `texts` and `prompts`, such as test[:100]; a file is train or test."""
    responses: Count | Literal["auto"] = "auto"
    """Responses to held-out prompts in an evaluation of a run, one to each or, of fewer prompts, more. auto = 24.

    At the end of a run the scores are those of four times as many.
    """
    max_documents: Count | Literal["auto"] | None = "auto"
    """Maximum number of texts, drawn at random; null = all.

    auto = 200, of which the evaluations of a run read so many as have 8,000 characters together.
    """
    scorers: dict[str, ScorerSection | None] = Field(default_factory=dict)
    """Scorers that never train, by name: each a model, a function or a server, as reward is; null = none of that name.

    They score the responses to held-out prompts, as eval/NAME. builtin:reviews brings `gold`, the true score.
    """

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = list[str]()
        for name in self.scorers:
            if not NAME.fullmatch(name):
                problems.append(f"eval.scorers: a name has letters, digits, - and _ only: {name!r}")
            elif not scorer_names([name]):
                problems.append(f"eval.scorers.{name}: another figure has this name: choose another one")
        for name, scorer in self.watched.items():
            problems += scorer.problems(f"eval.scorers.{name}")
        refuse(*problems)
        return self

    @property
    def watched(self) -> dict[str, ScorerSection]:
        """The scorers that never train, by name."""
        return {name: scorer for name, scorer in self.scorers.items() if scorer is not None}

    @property
    def updates_between(self) -> int:
        """Updates between two evaluations."""
        return EVERY if self.every == "auto" else self.every

    @property
    def most_responses(self) -> int:
        """Responses in an evaluation."""
        return RESPONSES if self.responses == "auto" else self.responses

    @property
    def most_texts(self) -> int | None:
        """Texts that are drawn; None = all."""
        return MOST_TEXTS if self.max_documents == "auto" else self.max_documents
