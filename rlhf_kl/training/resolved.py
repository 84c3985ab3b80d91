"""What the config of `train` leaves open, decided once and before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from rlhf_kl.config.named import NOTHING, Given, check_named
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.sections import chat_problems, refuse
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.rows import PromptRow, read_texts
from rlhf_kl.models.engine import require_engine
from rlhf_kl.training import sets
from rlhf_kl.training.device import on_this_machine
from rlhf_kl.training.load import Loader
from rlhf_kl.training.world_files import with_files
from rlhf_kl.ui import log


@dataclass(frozen=True)
class Resolved:
    """A config with nothing left to decide, and the data that decided it."""

    stored: TrainConfig  # as config.yaml tells it: `builtin:NAME` stays
    config: TrainConfig  # from which the run is built: files and folders in place of each `builtin:NAME`
    rows: tuple[list[PromptRow], list[PromptRow]]  # prompts to train on, and held-out ones
    texts: list[str]  # held out, for the perplexity
    given: Given = field(default_factory=dict)  # what came from Python, by config key


def resolve(config: TrainConfig, given: Given = NOTHING) -> Resolved:
    """Decide the number type, the files and the chat template of a config, and read its data.

    `given`: what came from Python, by the config key that names it: `reward.kind`, and the rows of `data.prompts` and
    `eval.texts`; empty ones come later, or not at all.
    Errors: InputError for what it names and is not there, and for data that cannot be used.
    """
    require_engine(config.rollout.engine)
    check_named(config, download=True, given=given)
    stored = on_this_machine(config)
    files = with_files(stored)
    held, own_prompts, own_texts = files.eval, given.get("data.prompts"), given.get("eval.texts")
    rows: tuple[list[PromptRow], list[PromptRow]] = ([], [])
    if own_prompts != []:
        rows = sets.prompts(files.data, held, sets.given_rows(own_prompts, files.data.column))
    texts = list[str]()
    if own_texts != []:
        read = partial(read_texts, column=held.column, key="eval.column:")
        own = sets.given_rows(own_texts, held.column)
        options: Any = {"most": held.most_texts, "given": own, "beside": held.prompts}
        texts = sets.evaluated(sets.load("eval.texts", held.texts, held.split, read, **options), held)
    chat = files.data.chat_template
    if chat == "auto" and rows[0]:
        chat = decided_chat(files.data, rows[0], Loader(files.run).tokenizer(files.policy.model, "policy.model"))
    return Resolved(with_chat(stored, chat), with_chat(files, chat), rows, texts, given)


def with_chat(config: TrainConfig, chat: bool | Literal["auto"]) -> TrainConfig:
    """The config with this `data.chat_template`, decided where there are prompts."""
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template": chat})})


def decided_chat(form: PromptsSection, prompts: Sequence[PromptRow], tokenizer: Any) -> bool:
    """Whether a run writes all its prompts with the tokenizer's chat template, by those that it trains on.

    Errors: InputError for what only a chat template reads, where none is used.
    """
    if form.chat_template != "auto":
        return form.chat_template
    chat = bool(tokenizer.chat_template) and any(prompt.messages for prompt in prompts)
    refuse(*chat_problems(form, chat=chat))
    if tokenizer.chat_template:
        kind, use = ("conversations", "used") if chat else ("plain texts", "not used")
        log.info(f"data.prompts are {kind}: the tokenizer's chat template is {use} (data.chat_template: auto)")
    return chat
