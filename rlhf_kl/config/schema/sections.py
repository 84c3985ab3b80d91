"""Types of values, the base class of all sections, and the sections that the training commands share."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.config import paths
from rlhf_kl.errors import InputError, is_address
from rlhf_kl.templates import template_fields

LARGEST = 10**12  # beyond any run, and still exact as a float
SEEDS = 2**32  # a seed is below


def _is_template(template: str) -> str:
    template_fields(template)
    return template


def _as_count(number: Any) -> Any:
    """1e4 as a whole number."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


Count = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_as_count)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Unit = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Source = Annotated[Name, BeforeValidator(paths.source)]
OptionalSource = Annotated[Name | None, BeforeValidator(paths.source)]
Plugin = Annotated[Name, BeforeValidator(paths.plugin)]
Schedule = Literal["constant", "linear", "cosine"]
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


def inner(raw: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The mapping below these keys of a mapping that may be wrong; empty if there is none."""
    value: Any = raw
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, dict) else {}


def with_world(raw: Mapping[str, Any], world: Any, *keys: str) -> dict[str, Any]:
    """A copy of a mapping in which the dotted keys that are left out, or null, name the built-in `world`.

    Nothing is added where `world` is a user's own model: a key that is left out is missing there.
    """
    filled = copy.deepcopy(dict(raw))
    for key in keys:
        section, _, name = key.partition(".")
        mapping = filled.setdefault(section, {})
        if isinstance(mapping, dict) and mapping.get(name) is None:
            mapping.pop(name, None)
            mapping |= {name: str(world)} if is_builtin(world) else {}
    return filled


def refuse(*problems: str) -> None:
    """Raise InputError where there are problems."""
    if problems:
        raise InputError(*problems)


def require_divides(small: str, small_value: int, large: str, large_value: int) -> None:
    """Errors: InputError, which names both keys."""
    if large_value % small_value:
        raise InputError(f"{small} must divide {large} ({large_value}): {small_value}")


def unread(section: Section, path: str, keys: Sequence[str], where: str) -> list[str]:
    """Problems of written keys that are only read `where`; no defaults, since a stored config writes every key."""
    fields, values = type(section).model_fields, {key: getattr(section, key) for key in keys}
    written = [key for key, value in values.items() if value != fields[key].get_default(call_default_factory=True)]
    return [f"{path}.{key} is only read where {where}: {values[key]!r}" for key in written]


def chat_problems(data: Section, *, chat: bool) -> list[str]:
    """Problems of a system message and of options beside a chat template that is not used."""
    return [] if chat else unread(data, "data", ("system", "chat_options"), "data.chat_template is true")


# ---- sections ----


class RunSection(Section):
    name: str = "run"
    """Name of the run; default: the name of the config file."""
    output_dir: Name = Field(default_factory=lambda data: f"runs/{data.get('name', 'run')}")
    """Folder of the run, relative to the working directory; default: runs/NAME."""
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0
    """Seed of every random choice."""
    device: str = "auto"
    """auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps. Never run: mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Data type of the layers; master weights, head and losses stay float32. auto: bfloat16 on a CUDA GPU that computes
    in it, float16 on an older one, float32 elsewhere."""
    wait_minutes: Positive = 30.0
    """With several processes: minutes to wait for one that does not answer. The wait for scores has no limit."""
    trust_remote_code: bool = False
    """Run code that comes with a model's weights. Read it first."""
    allow_pickle: bool = False
    """Load pickled weights if there are no safetensors. A pickle file can run code too."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str) -> str:
        if not name or name.startswith(".") or not name.isprintable() or set(name) & set("/\\"):
            raise ValueError(f"must be a plain folder name: {name!r}")
        return name

    @field_validator("output_dir")
    @classmethod
    def _is_local(cls, folder: str) -> str:
        if is_address(folder):
            raise ValueError(f"must be a local folder (write locally and sync it): {folder!r}")
        return folder

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", device):
            raise ValueError(f"must be auto, cpu, cuda, cuda:N or mps: {device!r}")
        return device


class CheckpointSection(Section):
    every: Count | Literal["auto"] = "auto"
    """Updates, or steps of sft and reward-model, between two checkpoints.

    auto = 5 updates or 50 steps for each 5 GB of weights and optimizer state, rounded up, but at most a quarter of the
    run, rounded up too; and one more wherever half an hour has passed without one. A resumed run keeps it.
    """
    keep: Count = 2
    """Checkpoints that stay on disk."""
    background: bool | Literal["auto"] = "auto"
    """Write checkpoints while the run goes on, from a copy in the host's memory.

    auto = where the models are on a GPU and the copy takes less than half of the memory that is free.
    """
    grace: NonNegative = 20.0
    """Seconds to finish and save the current update after SIGINT or SIGTERM; then it is interrupted.

    torchrun kills its processes 30 seconds after a signal, unless its --shutdown-timeout or
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise.
    """


class TrackingSection(Section):
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    trackers: list[Literal["wandb", "trackio", "mlflow"]] = Field(default_factory=list)
    """Send the metrics to these too, as project rlhf-kl (wandb: `WANDB_PROJECT`); each must be installed.

    All three were tested on disk, without a network; sending to a server was never tested.
    """


class OptimiserSection(Section):
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Maximum norm of the gradient; a larger gradient is scaled down."""
    max_skipped: Count = 3
    """Updates in a row that may be skipped because of non-finite numbers, before the run rolls back or stops."""


class EpochsSection(OptimiserSection):
    lr_schedule: Schedule = "cosine"
    """Learning-rate schedule: constant, or linear or cosine decay to zero."""
    learning_rate: Positive | Literal["auto"] = "auto"
    """Peak learning rate of AdamW; auto = by the model's size: 2e-5 at 124M, 1e-5 from 1B on, ten times that for an
    adapter; for a new model 5e-3 at 0.9M, 6e-4 at 124M.
    """
    epochs: Positive = 1.0
    """Passes over the data; a fraction is allowed."""
    batch_size: Count = 32
    """Examples per optimiser step, over all processes."""
    microbatch_size: Count = 32
    """Examples per forward pass; must divide batch_size. It changes the memory use, not the result."""
    warmup: Unit = 0.05
    """Share of the steps for the warm-up of the learning rate."""

    path: ClassVar[str]

    @model_validator(mode="after")
    def _divides(self) -> Self:
        small, large = f"{self.path}.microbatch_size", f"{self.path}.batch_size"
        require_divides(small, self.microbatch_size, large, self.batch_size)
        return self


class LoraSection(Section):
    r: Count = 16
    """Rank of the adapter."""
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / r."""
    target_modules: list[Name] | None = None
    """Names of the layers that get an adapter; null = every linear layer but the head."""


class TunedSection(Section):
    """A model that is trained."""

    lora: LoraSection | None = None
    """Train only a low-rank adapter (and a reward model's head); `lora: {}` uses the defaults."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a third more time, far less memory."""
