"""The configs of `rlhf-kl sft` and `rlhf-kl reward-model`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from rlhf_kl.builtin.world import DEFAULT_WORLD
from rlhf_kl.config.schema.sections import (
    CheckpointSection,
    Count,
    EpochsSection,
    Name,
    OptionalSource,
    RunSection,
    Section,
    Source,
    Template,
    TrackingSection,
    TunedSection,
    chat_problems,
    inner,
    refuse,
    require_divides,
    unread,
    with_world,
)
from rlhf_kl.errors import InputError


class ArchitectureSection(Section):
    hidden_size: Count = 144
    """Width."""
    layers: Count = 3
    """Transformer blocks."""
    heads: Count = 3
    """Attention heads; divides hidden_size."""
    context: Count = 128
    """Longest text in tokens."""
    vocab_size: Count = 1024
    """Tokens of the tokenizer that is trained with it."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        path = "policy.architecture"
        require_divides(f"{path}.heads", self.heads, f"{path}.hidden_size", self.hidden_size)
        return self


class SFTPolicySection(TunedSection):
    model: OptionalSource = None
    """Model to fine-tune; null = a new model, trained from scratch."""
    architecture: ArchitectureSection = Field(default_factory=ArchitectureSection)
    """Size of a new model."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.lora and self.model is None:
            raise InputError("policy.lora needs a policy.model to adapt")
        if self.model is not None:
            refuse(*unread(self, "policy", ("architecture",), "policy.model is null"))
        return self


class SFTDataSection(Section):
    texts: Source
    """Texts to train on: .jsonl .json .csv .parquet .txt, a hub id (owner/name:subset@revision), or builtin:NAME.

    Default: the texts of a built-in world; a model of your own has no default.
    """
    split: Name = "train"
    """Split of a hub id, folder or file, such as train or train[:1000]; a file is train."""
    column: Name = "text"
    """Column or key of the text, if there are no prompts and responses."""
    template: Template | None = None
    """Template for the text or prompt from several columns, such as "Title: {title}"; null = the column as it is."""
    prompt_column: Name | None = None
    """Column of the prompt; only the response is learned."""
    response_column: Name | None = None
    """Column of the response to learn: text, or a conversation that ends with it (then no prompt_column is needed)."""
    chat_template: bool = False
    """Format prompt and response as turns with the tokenizer's chat template."""
    system: str | None = None
    """System message before the prompt, if chat_template is true."""
    chat_options: dict[Name, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}, if chat_template is true."""
    eval_texts: OptionalSource = None
    """Held-out rows with the same columns; null = those that belong to `texts`, else a part that is not trained on."""
    eval_split: Name = "test"
    """Split of a hub id, folder or file in `eval_texts`, such as test[:100]; a file is train or test."""
    max_documents: Count | None = None
    """Maximum number of texts, drawn at random; null = all."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = chat_problems(self, chat=self.chat_template)
        if self.response_column is None:
            problems += unread(self, "data", ("prompt_column", "chat_template"), "data.response_column is given")
        else:
            problems += unread(self, "data", ("column",), "data.response_column is null")
        if self.eval_texts is None:
            problems += unread(self, "data", ("eval_split",), "data.eval_texts is given")
        refuse(*problems)
        return self


class SFTSection(EpochsSection):
    path: ClassVar[str] = "sft"


class SFTEvalSection(Section):
    every: Count = 50
    """Steps between two evaluations."""
    max_documents: Count | None = 200
    """Maximum number of texts, drawn at random; null = all."""


class SFTConfig(Section):
    """Supervised fine-tuning, or pre-training from scratch, of the starting policy."""

    run: RunSection = Field(default_factory=RunSection)
    policy: SFTPolicySection = Field(default_factory=SFTPolicySection)
    data: SFTDataSection
    sft: SFTSection = Field(default_factory=SFTSection)
    eval: SFTEvalSection = Field(default_factory=SFTEvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="before")
    @classmethod
    def _world(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return with_world(raw, inner(raw, "policy").get("model") or DEFAULT_WORLD, "data.texts")


class TrunkSection(TunedSection):
    model: Source = DEFAULT_WORLD
    """Language model that the reward model starts from."""


class PairsSection(Section):
    labels: OptionalSource = None
    """Labelled texts to train on instead of pairs, with labels 0 and 1."""
    text_column: Name = "text"
    """Column or key of a labelled text."""
    label_column: Name = "label"
    """Column or key of the label."""
    pairs: OptionalSource = None
    """Preference pairs to train on: .jsonl .json .csv .parquet, a hub id, or builtin:NAME.

    Default without labels: the pairs of the built-in model.
    """
    split: Name = "train"
    """Split of a hub id, folder or file, such as train or train[:1000]; a file is train."""
    prompt_column: Name | None = "prompt"
    """Column or key of the prompt; null = the common beginning of the responses, or the user's turn of a chat."""
    chosen_column: Name = "chosen"
    """Column or key of the preferred response: text, or a conversation that ends with it."""
    rejected_column: Name = "rejected"
    """Column or key of the other response."""
    template: Template | None = None
    """Template for the prompt from several columns, such as "Title: {title}"; null = prompt_column as it is."""
    chat_template: bool = False
    """Format prompt and response as turns with the tokenizer's chat template; the model's folder stores this choice."""
    eval_pairs: OptionalSource = None
    """Held-out pairs or labelled texts; null = those that belong to `pairs`, else a part that is not trained on."""
    eval_split: Name = "test"
    """Split of a hub id, folder or file in `eval_pairs`, such as test[:100]; a file is train or test."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.labels is not None and self.pairs is not None:
            raise InputError("data.labels and data.pairs exclude each other: train on one of them")
        if self.labels is None and self.pairs is None:
            raise InputError("data.pairs must be given if there are no data.labels: null")
        of_pairs = ("prompt_column", "chosen_column", "rejected_column", "template", "chat_template")
        keys, other = (of_pairs, "pairs") if self.pairs is None else (("text_column", "label_column"), "labels")
        problems = unread(self, "data", keys, f"data.{other} are given")
        if self.eval_pairs is None:
            problems += unread(self, "data", ("eval_split",), "data.eval_pairs are given")
        refuse(*problems)
        return self


class RewardModelSection(EpochsSection):
    path: ClassVar[str] = "reward_model"


class RewardModelEvalSection(Section):
    every: Count = 50
    """Steps between two evaluations."""
    max_pairs: Count | None = 500
    """Maximum number of held-out pairs or labelled texts, drawn at random; null = all."""


class RewardModelConfig(Section):
    """Reward model from preference pairs (Bradley-Terry)."""

    run: RunSection = Field(default_factory=RunSection)
    policy: TrunkSection = Field(default_factory=TrunkSection)
    data: PairsSection
    reward_model: RewardModelSection = Field(default_factory=RewardModelSection)
    eval: RewardModelEvalSection = Field(default_factory=RewardModelEvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="before")
    @classmethod
    def _world(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or inner(raw, "data").get("labels") is not None:
            return raw
        return with_world(raw, inner(raw, "policy").get("model") or DEFAULT_WORLD, "data.pairs")
