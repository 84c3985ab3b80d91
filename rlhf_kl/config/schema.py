"""Every key that a config may hold, with its default and its meaning."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from rlhf_kl.components import is_reference, nearest, suggestion
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers.factory import stored_name
from rlhf_kl.templates import template_fields

Kind: TypeAlias = Literal["train", "sft", "reward-model"]
KIND_NAMES: tuple[Kind, ...] = ("train", "sft", "reward-model")

PRESETS = {"conservative": 0.02, "moderate": 0.075, "aggressive": 0.15}  # nats per token
SUM = "sum"  # the reward that is made of several

LARGEST = 10**12  # beyond any run, and still exact as a float
SEEDS = 2**32  # a seed is below


class Location:
    """Marks a text that may name something on disk; loading makes it absolute."""

    def __init__(self, *, path: bool, plugin: bool) -> None:
        self.path = path  # a file or folder
        self.plugin = plugin  # "file.py:attribute"


Count = Annotated[int, Field(ge=1, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Unit = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Source = Annotated[str, Field(min_length=1), Location(path=True, plugin=False)]
OptionalSource = Annotated[Name | None, Location(path=True, plugin=False)]
OptionalScorer = Annotated[Name | None, Location(path=True, plugin=True)]
Plugin = Annotated[str, Field(min_length=1), Location(path=False, plugin=True)]
Schedule = Literal["constant", "linear", "cosine"]


def _is_template(template: str) -> str:
    template_fields(template)
    return template


Template = Annotated[str, Field(min_length=1), AfterValidator(_is_template)]


class Section(BaseModel):
    """A mapping of the YAML: unknown keys and wrong types are errors, 1 is accepted for 1.0."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,  # a section that is left out must agree with the others too
        use_attribute_docstrings=True,
    )


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, also where it may be null."""
    options = (annotation, *get_args(annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def _refuse(*problems: str) -> None:
    if problems:
        raise InputError(*problems)


def _require_divides(small: str, small_value: int, large: str, large_value: int) -> list[str]:
    if large_value % small_value == 0:
        return []
    return [f"{small} must divide {large} ({large_value}): {small_value}"]


# ---- shared by all three commands ----


class RunSection(Section):
    name: str = "run"
    """Name of the run; in a file without it, the file's own name."""
    output_dir: Name = Field(default_factory=lambda data: f"runs/{data.get('name', 'run')}")
    """Folder of the run, from the working directory; runs/NAME where not written."""
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0
    """Seed of every random choice."""
    device: str = "auto"
    """auto (the best there is), cpu, cuda, cuda:N or mps."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; master weights stay float32."""
    trust_remote_code: bool = False
    """Run code that comes with a model's weights. Read it first."""
    allow_pickle: bool = False
    """Load weights from pickled files where there are no safetensors: they can run code too."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str) -> str:
        if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
            raise ValueError(f"must be a plain folder name: {name!r}")
        return name

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", device):
            raise ValueError(f"must be auto, cpu, cuda, cuda:N or mps: {device!r}")
        return device


class CheckpointSection(Section):
    every: Count = 5
    """Updates between two checkpoints."""
    keep: Count = 2
    """Checkpoints that stay on disk."""
    grace: NonNegative = 30.0
    """Seconds that the running update may take to its end after SIGINT or SIGTERM; then it is cut short."""


class TrainCheckpointSection(CheckpointSection):
    best: Literal["objective/rlhf_reward", "objective/scores", "eval/scores", "eval/gold", "eval/perplexity"] | None = (
        None
    )
    """Also keep the checkpoint that is best by this figure (the lowest perplexity, else the highest); null = none."""


class TrackingSection(Section):
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""


class OptimiserSection(Section):
    learning_rate: Positive
    """Peak learning rate of AdamW."""
    lr_schedule: Schedule = "cosine"
    """Course of the learning rate: constant, or linear or cosine down to zero."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    max_skipped: Count = 3
    """Updates in a row that may be skipped over numbers that are not finite, before the run goes back or stops."""


class EpochsSection(OptimiserSection):
    epochs: Positive = 1.0
    """Passes over the data; a fraction is allowed."""
    batch_size: Count = 32
    """Examples per optimiser step, over all processes."""
    microbatch_size: Count = 32
    """Examples per forward pass; divides batch_size, changes memory and not the result."""
    warmup: Unit = 0.05
    """Share of the steps over which the learning rate rises."""

    path: ClassVar[str]

    @model_validator(mode="after")
    def _divides(self) -> Self:
        small, large = f"{self.path}.microbatch_size", f"{self.path}.batch_size"
        _refuse(*_require_divides(small, self.microbatch_size, large, self.batch_size))
        return self


def _system_problems(system: str | None, chat: bool) -> list[str]:
    return ["data.system is only read where data.chat_template is true"] if system is not None and not chat else []


class LoraSection(Section):
    r: Count = 16
    """Rank of the adapter."""
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / r."""
    target_modules: list[Name] | None = None
    """Names of the layers that get an adapter; null = every linear layer but the head."""


class TunedSection(Section):
    """What is true of every model that is trained."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a third more time, far less memory."""


# ---- train ----


class PolicySection(TunedSection):
    model: Source = "builtin:reviews"
    """Starting policy: a local folder, a hub id (owner/name, owner/name@revision), or builtin:NAME."""
    value: Literal["features", "head", "separate"] = "features"
    """Value function: a small network on what the reference and the reward model make of a state, a head on the
    policy, or a model of its own that starts from the reward model."""
    lora: LoraSection | None = None
    """Train a low-rank adapter and leave the weights as they are: `lora: {}` for the defaults."""


class ReferenceSection(Section):
    model: OptionalSource = None
    """What the KL is measured to; null = a frozen copy of the starting policy."""


class ScorerSection(Section):
    """One scorer: a model, or a function whose options stand beside its kind."""

    model_config = ConfigDict(extra="allow")

    kind: Plugin = "model"
    """model, or a function as file.py:function or module:function; its options stand beside it."""
    model: OptionalSource = Field(
        default_factory=lambda data: "builtin:reviews" if data.get("kind") == "model" else None
    )
    """Reward model, where kind is model: a local folder, a hub id (owner/name@revision), or builtin:NAME."""
    label: Name | None = None
    """Output of a classifier with several: its log-odds against the others are the score."""
    chat_template: bool | None = None
    """Write prompt and response as turns in the reward model's chat template; null = as its folder says, else false."""
    append_eos: bool | None = None
    """End the text with the reward model's EOS; null = as its folder says, else true."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of a reward function."""
        return dict(self.model_extra or {})

    def unknown(self, path: str) -> list[str]:
        """A problem for each key beside the known ones, where no function takes it as an option."""
        return [
            f"{path}.{key}: unknown key{suggestion(key, type(self).model_fields, f'{path}.')}" for key in self.options
        ]

    def problems(self, path: str, kinds: str = "model") -> list[str]:
        """What does not agree; `path` is the dotted key of this scorer."""
        found = []
        if self.kind == "model":
            found += self.unknown(path)
            if self.model is None:
                found.append(f"{path}.model must be a model where {path}.kind is model: null")
            return found
        if not is_reference(self.kind):
            found.append(
                f"{path}.kind must be {kinds}, file.py:function or module:function: {self.kind!r}"
                + ("; did you mean model?" if nearest(self.kind, ["model"]) else "")
            )
        for key in ("model", "label", "chat_template", "append_eos"):
            if getattr(self, key) is not None:
                found.append(f"{path}.{key} is only read where {path}.kind is model: {getattr(self, key)!r}")
        return found


class TermSection(ScorerSection):
    weight: float = 1.0
    """What the term's raw score is multiplied by."""


class RewardSection(ScorerSection):
    general: ClassVar[frozenset[str]] = frozenset(
        {"normalize", "clip", "missing_eos_penalty", "length_penalty", "repetition_penalty", "time_limit", "gold"}
    )

    kind: Plugin = "model"
    """model, a function as file.py:function or module:function with its options beside it, or sum."""
    terms: dict[Name, TermSection] | None = None
    """Where kind is sum: scorers by name, each with its kind and weight; their raw scores are added up."""
    normalize: bool = True
    """Scale scores to mean 0 and spread 1 once, on responses of the reference."""
    clip: Positive | None = 5.0
    """Bound on the size of a normalised score; null = none."""
    missing_eos_penalty: NonNegative = 1.0
    """Taken from the score of a response that was cut off."""
    length_penalty: NonNegative = 0.0
    """Taken from the score for every token of the response."""
    repetition_penalty: NonNegative = 0.0
    """Times the share of a response's runs of three tokens that it has already had, taken from its score."""
    time_limit: Positive | None = 600.0
    """Seconds that a reward function may take for one batch; null = any."""
    gold: OptionalScorer = None
    """A second scorer that is only logged; builtin:reviews brings its own."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.kind != SUM:
            terms = ["reward.terms is only read where reward.kind is sum"] if self.terms is not None else []
            _refuse(*self.problems("reward", "model, sum"), *terms)
            return self
        problems = self.unknown("reward")
        problems += [
            f"reward.{key} is only read where reward.kind is model" for key in ("model", "label") if getattr(self, key)
        ]
        if not self.terms:
            problems.append("reward.terms must name at least one scorer where reward.kind is sum")
        for name, term in (self.terms or {}).items():
            problems += term.problems(f"reward.terms.{name}")
        _refuse(*problems)
        return self


class PromptsSection(Section):
    prompts: Source = "builtin:reviews"
    """Prompts to train on: .jsonl .json .csv .parquet .txt, a hub id (owner/name:subset@revision), or builtin:NAME."""
    split: Name = "train"
    """Split of a hub id or folder, such as train or train[:1000]."""
    column: Name = "prompt"
    """Column or key of the prompt."""
    template: Template | None = None
    """The prompt from several columns, such as "Title: {title}"; null = `column` as it is."""
    first_tokens: Count | None = None
    """Keep only so many tokens from a prompt's beginning; null = all."""
    chat_template: bool = False
    """Write the prompt as a turn of the user in the tokenizer's chat template."""
    system: str | None = None
    """System message in front, where chat_template is on."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        _refuse(*_system_problems(self.system, self.chat_template))
        return self


class RolloutSection(Section):
    batch_size: Count = 64
    """Responses per update, over all processes."""
    max_new_tokens: Count = 48
    """Length at which a response is cut off."""
    temperature: Positive = 1.0
    """Sampling temperature; every log-probability uses it too."""
    reference_samples: Annotated[int, Field(ge=2, le=LARGEST)] = 1024
    """Responses of the reference drawn at the start, to normalise scores and to find the first beta."""


class PPOSection(OptimiserSection):
    total_episodes: Count = 3840
    """Responses in the whole run, rounded up to whole batches."""
    epochs: Count = 4
    """Passes over each batch."""
    minibatch_size: Count = 64
    """Responses per optimiser step; divides rollout.batch_size."""
    microbatch_size: Count | None = None
    """Most responses in a training pass; divides minibatch_size, changes memory and not the result.

    null = as many as a pass has room for: 96 MiB of activations on a CPU, 8 GiB on a GPU, or as much as the weights.
    """
    learning_rate: Positive = 2.0e-4
    """Peak learning rate of Adam."""
    lr_schedule: Schedule = "linear"
    """Course of the learning rate over the run: constant, or linear or cosine down to zero."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    advantage: Literal["gae"] = "gae"
    """How advantages are estimated: gae, generalised advantage estimation."""
    gamma: Unit = 1.0
    """Discount."""
    lam: Unit = 0.95
    """Lambda of generalised advantage estimation."""
    critic_lam: Unit | None = None
    """Lambda of the value function's targets; null = lam, and 1 for `features`: the rewards as they came."""
    critic_epochs: Count = 5
    """Passes over each batch that fit a value function on `features`."""
    critic_learning_rate: Positive = 2.0e-3
    """Learning rate of a value function on `features`."""
    value_warmup: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """Updates at the start that train the value function only."""
    cliprange: Positive = 0.2
    """Clip of the probability ratio."""
    cliprange_value: Positive = 0.2
    """Clip of the change of a value; `head` and `separate`."""
    vf_coef: NonNegative = 0.1
    """Weight of the value loss beside the policy's; `head` and `separate`."""
    whiten_rewards: bool = False
    """Scale rewards to spread 1 within a batch."""
    max_update_kl: Positive | None = None
    """End an update early above this KL (nats per token) of the policy to the one that sampled."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        small, large = self.microbatch_size or 1, self.minibatch_size
        _refuse(*_require_divides("ppo.microbatch_size", small, "ppo.minibatch_size", large))
        return self


class ControllerSection(Section):
    model_config = ConfigDict(extra="allow")
    general: ClassVar[frozenset[str]] = frozenset()

    kind: Plugin = "adaptive"
    """A built-in controller, or a class as file.py:Class or module:Class; its options stand beside it."""
    coef: float | Literal["auto"] = "auto"
    """Starting beta; auto = from the scores and the KL of reference samples."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the kind."""
        return dict(self.model_extra or {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Options of the kind, and the starting beta where it is written."""
        return self.options if self.coef == "auto" else {"coef": self.coef, **self.options}

    @field_validator("kind")
    @classmethod
    def _stored_name(cls, kind: str) -> str:
        return stored_name(kind)

    @field_validator("coef")
    @classmethod
    def _range(cls, coef: float | str, info: ValidationInfo) -> float | str:
        if isinstance(coef, float):
            if coef < 0:
                raise ValueError(f"must not be negative: {coef:g}")
            if coef == 0 and info.data.get("kind") not in (None, "fixed"):
                raise ValueError("must be positive: 0 (only kind fixed may hold beta at 0)")
        return coef

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if "target" in self.options:
            raise InputError("kl.controller.target: unknown key; did you mean kl.target?")
        return self


class CeilingSection(Section):
    value: float | str = "1.5x"
    """The KL that must not be passed: nats in kl.unit, or a multiple of the target such as 1.5x."""
    action: Literal["backtrack", "rollback", "stop"] = "backtrack"
    """backtrack shortens the update, rollback goes back to a checkpoint, stop ends the run."""

    @field_validator("value")
    @classmethod
    def _is_amount(cls, value: float | str) -> float | str:
        if isinstance(value, str) and not re.fullmatch(r"[0-9]{0,6}\.?[0-9]{1,6}x", value):
            raise ValueError(f"must be a number or a multiple such as 1.5x: {value!r}")
        if not isinstance(value, str) and value <= 0:
            raise ValueError(f"must be positive: {value:g}")
        return value

    def nats(self, target: float) -> float:
        return target * float(self.value[:-1]) if isinstance(self.value, str) else self.value


class KLSection(Section):
    estimator: Literal["k1", "k2", "k3", "abs", "exact", "importance"] = "k1"
    """What each token pays."""
    placement: Literal["reward", "loss", "rao_blackwell"] = "reward"
    """Where the KL enters; rao_blackwell takes the exact estimator only."""
    target: Positive | Literal["conservative", "moderate", "aggressive"] = 0.1
    """Nats in `unit`; or conservative (0.02), moderate (0.075), aggressive (0.15), per token only."""
    unit: Literal["token", "sequence"] = "token"
    """What the target, the ceiling and the controller count in."""
    controller: ControllerSection = Field(default_factory=ControllerSection)
    """What moves beta; a constant beta (kind fixed) only reports the target."""
    ceiling: CeilingSection | None = Field(default_factory=CeilingSection)
    """A bound beyond the controller; null = none."""

    @property
    def target_value(self) -> float:
        """The target in nats, in `unit`."""
        return PRESETS[self.target] if isinstance(self.target, str) else self.target

    @property
    def ceiling_value(self) -> float | None:
        """The ceiling in nats, in `unit`."""
        return None if self.ceiling is None else self.ceiling.nats(self.target_value)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = []
        if isinstance(self.target, str) and self.unit != "token":
            problems.append(f"kl.target must be a number where kl.unit is {self.unit}: {self.target!r}")
        if self.placement == "rao_blackwell" and self.estimator != "exact":
            problems.append(f"kl.estimator must be 'exact' where kl.placement is rao_blackwell: {self.estimator!r}")
        if self.ceiling is not None and self.ceiling.nats(self.target_value) <= self.target_value:
            problems.append(f"kl.ceiling.value must be above kl.target ({self.target_value:g}): {self.ceiling.value}")
        _refuse(*problems)
        return self


class EvalSection(Section):
    every: Count = 10
    """Updates between two evaluations; there is one before the first and one after the last too."""
    texts: Source = "builtin:reviews"
    """Held-out texts for the perplexity."""
    column: Name = "text"
    """Column or key of the text."""
    prompts: OptionalSource = None
    """Held-out prompts to score, in columns as those of data.prompts; null = those that come with data.prompts."""
    split: Name = "test"
    """Split of a hub id or folder in `texts` and `prompts`."""
    max_documents: Count | None = 200
    """Texts that are read at most; null = all."""


class TrainTrackingSection(TrackingSection):
    samples_every: Count = 10
    """Updates between two sets of rows in samples.jsonl."""


class TrainConfig(Section):
    """PPO with a KL controller."""

    run: RunSection = Field(default_factory=RunSection)
    policy: PolicySection = Field(default_factory=PolicySection)
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    data: PromptsSection = Field(default_factory=PromptsSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    ppo: PPOSection = Field(default_factory=PPOSection)
    kl: KLSection = Field(default_factory=KLSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: TrainCheckpointSection = Field(default_factory=TrainCheckpointSection)
    tracking: TrainTrackingSection = Field(default_factory=TrainTrackingSection)

    @property
    def updates(self) -> int:
        """Rollouts in the whole run."""
        return math.ceil(self.ppo.total_episodes / self.rollout.batch_size)

    @property
    def critic_lam(self) -> float:
        """Lambda of the value function's targets."""
        otherwise = 1.0 if self.policy.value == "features" else self.ppo.lam
        return otherwise if self.ppo.critic_lam is None else self.ppo.critic_lam

    # On the field and not on the model: it speaks up while another section is still wrong.
    @field_validator("ppo")
    @classmethod
    def _divides(cls, ppo: PPOSection, info: ValidationInfo) -> PPOSection:
        rollout: RolloutSection | None = info.data.get("rollout")
        if rollout is not None:
            _refuse(
                *_require_divides("ppo.minibatch_size", ppo.minibatch_size, "rollout.batch_size", rollout.batch_size)
            )
        return ppo


# ---- sft ----


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
        _refuse(*_require_divides(f"{path}.heads", self.heads, f"{path}.hidden_size", self.hidden_size))
        return self


class SFTPolicySection(TunedSection):
    model: OptionalSource = None
    """Model to go on from; null = a new one, from scratch."""
    architecture: ArchitectureSection = Field(default_factory=ArchitectureSection)
    """Size of a new model."""
    lora: LoraSection | None = None
    """Train a low-rank adapter and leave the weights as they are: `lora: {}` for the defaults."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        _refuse(*(["policy.lora needs a policy.model to adapt"] if self.lora and self.model is None else []))
        return self


class SFTDataSection(Section):
    texts: Source = "builtin:reviews"
    """Texts to train on: .jsonl .json .csv .parquet .txt, a hub id (owner/name:subset@revision), or builtin:NAME."""
    split: Name = "train"
    """Split of a hub id or folder, such as train or train[:1000]."""
    column: Name = "text"
    """Column or key of the text, where there are no prompts and responses."""
    template: Template | None = None
    """The text, or the prompt, from several columns, such as "Title: {title}"; null = the column as it is."""
    prompt_column: Name | None = None
    """Column of the prompt, where the response alone is to be learned."""
    response_column: Name | None = None
    """Column of the response to learn: text, or a conversation that ends with it (then no prompt_column is needed)."""
    chat_template: bool = False
    """Write prompt and response as turns in the tokenizer's chat template."""
    system: str | None = None
    """System message in front, where chat_template is on."""
    eval_texts: OptionalSource = None
    """Held-out rows of the same columns; null = those that come with `texts`, else a part that is kept apart."""
    eval_split: Name = "test"
    """Split of a hub id or folder in `eval_texts`."""
    max_documents: Count | None = None
    """Texts that are read at most; null = all."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = _system_problems(self.system, self.chat_template)
        if self.prompt_column is not None and self.response_column is None:
            problems.append("data.prompt_column needs a data.response_column beside it")
        if self.chat_template and self.response_column is None:
            problems.append("data.chat_template needs data.response_column: texts have no turns")
        _refuse(*problems)
        return self


class SFTSection(EpochsSection):
    path: ClassVar[str] = "sft"
    learning_rate: Positive = 5.0e-3
    """Peak learning rate of AdamW."""


class SFTEvalSection(Section):
    every: Count = 50
    """Steps between two evaluations."""
    max_documents: Count | None = 200
    """Texts that are read at most; null = all."""


class SFTConfig(Section):
    """Supervised fine-tuning, or pre-training from scratch, of the starting policy."""

    run: RunSection = Field(default_factory=RunSection)
    policy: SFTPolicySection = Field(default_factory=SFTPolicySection)
    data: SFTDataSection = Field(default_factory=SFTDataSection)
    sft: SFTSection = Field(default_factory=SFTSection)
    eval: SFTEvalSection = Field(default_factory=SFTEvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)


# ---- reward-model ----


class TrunkSection(TunedSection):
    model: Source = "builtin:reviews"
    """Language model that the reward model starts from."""
    lora: LoraSection | None = None
    """Train a low-rank adapter and the head, and leave the other weights as they are: `lora: {}` for the defaults."""


class PairsSection(Section):
    labels: OptionalSource = None
    """Labelled texts to train on in place of pairs: labels 0 and 1, or numbers to predict."""
    text_column: Name = "text"
    """Column or key of a labelled text."""
    label_column: Name = "label"
    """Column or key of the label."""
    pairs: OptionalSource = Field(default_factory=lambda data: None if data.get("labels") else "builtin:reviews")
    """Preference pairs to train on: .jsonl .json .csv .parquet, a hub id, or builtin:NAME."""
    split: Name = "train"
    """Split of a hub id or folder, such as train or train[:1000]."""
    prompt_column: Name | None = "prompt"
    """Column or key of the prompt; null = what both responses begin with, or the user's turn of a conversation."""
    chosen_column: Name = "chosen"
    """Column or key of the preferred response: text, or a conversation that ends with it."""
    rejected_column: Name = "rejected"
    """Column or key of the other response."""
    template: Template | None = None
    """The prompt from several columns, such as "Title: {title}"; null = prompt_column as it is."""
    chat_template: bool = False
    """Write prompt and response as turns in the tokenizer's chat template; the model's folder remembers it."""
    eval_pairs: OptionalSource = None
    """Held-out pairs, or labelled texts; null = those that come with `pairs`, else a part that is kept apart."""
    eval_split: Name = "test"
    """Split of a hub id or folder in `eval_pairs`."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.labels is not None and self.pairs is not None:
            raise InputError("data.labels and data.pairs exclude each other: train on one of them")
        if self.labels is None and self.pairs is None:
            raise InputError("data.pairs must be given where there are no data.labels: null")
        if self.labels is not None and self.chat_template:
            raise InputError("data.chat_template needs data.pairs: labelled texts have no turns")
        return self


class RewardModelSection(EpochsSection):
    path: ClassVar[str] = "reward_model"
    learning_rate: Positive = 1.0e-3
    """Peak learning rate of AdamW."""


class RewardModelEvalSection(Section):
    every: Count = 50
    """Steps between two evaluations."""
    max_pairs: Count | None = 500
    """Held-out pairs or labelled texts that are read at most; null = all."""


class RewardModelConfig(Section):
    """Reward model from preference pairs (Bradley-Terry)."""

    run: RunSection = Field(default_factory=RunSection)
    policy: TrunkSection = Field(default_factory=TrunkSection)
    data: PairsSection = Field(default_factory=PairsSection)
    reward_model: RewardModelSection = Field(default_factory=RewardModelSection)
    eval: RewardModelEvalSection = Field(default_factory=RewardModelEvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)


AnyConfig: TypeAlias = TrainConfig | SFTConfig | RewardModelConfig
MODELS: dict[Kind, type[TrainConfig] | type[SFTConfig] | type[RewardModelConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
}
