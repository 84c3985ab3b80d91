"""The models of a run without weights: how large they are, and what a pass of their layers keeps.

They are built on the meta device. What a pass keeps is counted in a pass, on tensors that have shapes and no numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_kl.config.named import scorers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.sections import LoraSection
from rlhf_kl.errors import InputError, blame
from rlhf_kl.hub import first_line, hub_name
from rlhf_kl.memory import kept_per_token
from rlhf_kl.models.lm import Trunk
from rlhf_kl.models.lora import adapter_base, has_adapter, is_adapter
from rlhf_kl.models.pretrained import compute_dtype, quiet_transformers
from rlhf_kl.sharding import layers_of
from rlhf_kl.training.load import tuned
from rlhf_kl.types import REWARD

AT_ONCE = 0.65  # of what a layer keeps for its backward pass, what a pass without one holds (Llama, Mistral, Qwen)


@dataclass(frozen=True)
class Sizes:
    """Numbers in the parameters of a model."""

    inside: int = 0  # its layers
    outside: int = 0  # its embeddings and its head
    layer: int = 0  # its largest layer

    @classmethod
    def of(cls, model: Any, *, trained: bool = False) -> Sizes:
        """All parameters, or those that learn."""

        def count(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)

        layers = [*map(count, layers_of(model)), 0]
        return cls(sum(layers), count(model) - sum(layers), max(layers))


@dataclass(frozen=True)
class Outline:
    """A model without weights, and the bytes that its layers keep of a row for the backward pass."""

    model: Any
    kept: float
    rough: bool = False  # `kept` is an estimate

    @cached_property
    def every(self) -> Sizes:
        """All its parameters."""
        return Sizes.of(self.model)

    @cached_property
    def learning(self) -> Sizes:
        """Those that learn."""
        return Sizes.of(self.model, trained=True)

    @property
    def shape(self) -> Any:
        """Its config."""
        return self.model.config.get_text_config()

    @property
    def at_once(self) -> float:
        """The bytes that a pass without gradients holds of a row."""
        return AT_ONCE * self.kept / int(self.shape.num_hidden_layers)


@dataclass(frozen=True)
class Outlines:
    """The models of a run."""

    policy: Outline
    reference: Outline | None = None  # None: the policy without its adapter
    value: Outline | None = None  # a separate value function
    rewards: list[Outline] = field(default_factory=list)  # that score what is trained on
    watched: list[Outline] = field(default_factory=list)  # that score evaluations alone


def outlines(config: TrainConfig, prompt: int) -> Outlines:
    """The models of a config that names files, for prompts of so many tokens. Errors: InputError without a config."""
    length = prompt + config.rollout.max_new_tokens
    dtype, section, remote = compute_dtype(config.run.dtype), config.policy, config.run.trust_remote_code

    def outline(key: str, ref: str, kind: Any = AutoModelForCausalLM) -> Outline:
        with blame(key), torch.device("meta"):
            return Outline(build(ref, kind, remote), *kept_by_pass(ref, kind, remote, dtype, length))

    policy, adapted = outline("policy.model", section.model), is_adapter(section.model)
    if adapted and section.lora is None:  # it is trained further; its rank hardly counts
        section = section.model_copy(update={"lora": LoraSection()})
    policy = Outline(tuned(policy.model, section, section.model, config.run.seed), policy.kept, policy.rough)
    starts = [None, section.model, *([adapter_base(section.model)] if adapted else [])]
    ref, reference, value = config.reference.model, None, None
    if ref not in starts or not has_adapter(policy.model):
        reference = outline("reference.model", ref or section.model)
    models = {key: each.model for key, each in scorers_of(config).items() if each.kind == "model" and each.model}
    scorers = {key: outline(f"{key}.model", ref, AutoModelForSequenceClassification) for key, ref in models.items()}
    if config.critic == "separate":  # `value_trunk` compares their tokens too
        start = scorers.get(REWARD) or outline("policy.model", section.model)
        value = Outline(start.model.base_model, start.kept, start.rough)
    rewards = [each for key, each in scorers.items() if key.startswith(REWARD)]
    return Outlines(policy, reference, value, rewards, [each for each in scorers.values() if each not in rewards])


def build(ref: str, kind: Any, remote_code: bool) -> Any:
    """A model in float32 by its config alone, of an adapter its base. `kind`: of transformers. Errors: InputError."""
    if is_adapter(ref):
        return build(adapter_base(ref), kind, remote_code)
    hub = None if Path(ref).exists() else hub_name(ref)
    place = {"revision": hub.revision} if hub else {}
    try:
        with quiet_transformers():
            shape = AutoConfig.from_pretrained(hub.name if hub else ref, **place, trust_remote_code=remote_code)
            return kind.from_config(shape, dtype=torch.float32, trust_remote_code=remote_code).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{ref}: cannot be built from its config: {first_line(error)}") from error


@cache
def kept_by_pass(ref: str, kind: Any, remote_code: bool, dtype: torch.dtype, length: int) -> tuple[float, bool]:
    """Bytes that a pass of the layers keeps of a row of `length` tokens for its backward pass, and whether roughly."""

    def kept(rows: int) -> int:
        own = {p.untyped_storage()._cdata for p in trunk.parameters()}
        found: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor.detach()  # an output that is saved would hold itself

        ids = torch.zeros(rows, length, dtype=torch.long)
        with saved_tensors_hooks(keep, lambda tensor: tensor), trunk.precision():
            trunk.base.base_model(input_ids=ids, use_cache=True)  # else they get a mask that a run leaves out
        return sum(storage.nbytes() for number, storage in found.items() if number not in own)

    logger = logging.getLogger(FakeTensorMode.__module__)
    logger.disabled = True  # it shows the errors that are caught here
    try:
        with torch.device("cpu"), FakeTensorMode():
            trunk = Trunk(build(ref, kind, remote_code), dtype)
            return kept(2) - kept(1), False  # without copies of weights
    except Exception:  # of layers that look at numbers, as experts do: roughly
        with torch.device("meta"):
            return length * kept_per_token(build(ref, kind, remote_code)) * dtype.itemsize, True
    finally:
        logger.disabled = False
