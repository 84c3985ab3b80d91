"""Low-rank adapters through peft: one copy of the weights serves as policy and as reference.

Source: Hu et al. 2021 (2106.09685). With the adapter switched off, the model gives the same results
as the start model, bit for bit. A merged model is only close to the trained one.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.pytorch_utils import Conv1D

from rlhf_kl.errors import InputError, blame, suggestion
from rlhf_kl.hub import first_line
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import switch_dropout_off
from rlhf_kl.shell import shell_command

TRAINED, KEPT = "default", "start"  # names of the trained adapter, and of its frozen initial copy
FACTORS = ("lora_A", "lora_B")  # of what an adapter adds to a layer: B A, and B is 0 at the start
ADAPTER_CONFIG = "adapter_config.json"
LANGUAGE_MODEL: Literal["CAUSAL_LM"] = "CAUSAL_LM"  # peft's names for the kinds of base models
CLASSIFIER: Literal["SEQ_CLS"] = "SEQ_CLS"


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def has_adapter(model: Any) -> bool:
    """Whether a model is one with an adapter on it."""
    return hasattr(model, "peft_config")


def adapter_base(folder: str | Path) -> str:
    """The model that an adapter was made for: a folder, or a hub id with its revision.

    Errors: InputError if the adapter does not name it.
    """
    config = _adapter_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise InputError(f"{folder}: {ADAPTER_CONFIG} names no base_model_name_or_path")
    return f"{base}@{revision}" if revision and not Path(base).is_dir() else base


def blame_base(folder: str | Path) -> AbstractContextManager[None]:
    """Errors: InputError of the base model, with the file that names it in front: the base may have moved."""
    return blame(f"{Path(folder) / ADAPTER_CONFIG}: base_model_name_or_path")


def require_classifier_adapter(folder: str | Path) -> None:
    """Errors: InputError for the adapter of a language model, which brings no reward head."""
    task = _adapter_config(folder).get("task_type")
    if task != CLASSIFIER:
        raise InputError(
            f"{folder}: is the adapter of another kind of model (task_type {task}), not of a sequence "
            f"classifier: its reward head would be random; train one with `{shell_command()} reward-model`"
        )


def _adapter_config(folder: str | Path) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder}: {ADAPTER_CONFIG} cannot be read: {first_line(error)}") from error


def add_adapter(
    model: Any,
    *,
    r: int,
    alpha: float,
    target_modules: list[str] | None,
    ref: str,
    seed: int,
    task: Literal["CAUSAL_LM", "SEQ_CLS"] = LANGUAGE_MODEL,
) -> Any:
    """A new adapter on a model whose weights are frozen; before training it changes nothing.

    The head of a classifier is trained as a whole and belongs to its adapter.

    `target_modules`: names of the layers that get one; None = every linear layer but the head. `ref`: what the
    adapter's config says of its base. Deterministic for a seed, so that a resumed run has the same start.
    Errors: InputError for each name that no layer has.
    """
    from peft import LoraConfig, get_peft_model

    _check_targets(model, target_modules or [])
    settings = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=0.0,  # with dropout, the log-probs of one policy would differ
        target_modules=target_modules or "all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 keeps weights transposed
        task_type=task,
    )
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore", FutureWarning)  # of transformers: peft uses old names
            torch.manual_seed(seed)
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(f"{first_line(error)}") from error
    name, _, revision = ref.partition("@")
    config = adapted.peft_config[TRAINED]
    config.base_model_name_or_path, config.revision = (ref, None) if Path(ref).is_dir() else (name, revision or None)
    return _ready(adapted)


def _check_targets(model: Any, targets: list[str]) -> None:
    """Errors: InputError for each name that no layer has; peft takes the others without a word."""
    names = [f".{name}" for name, _ in model.named_modules()]
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))}
    unknown = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
    if unknown:
        told = (f"target_modules: no layer has the name {name!r}{suggestion(name, linear)}" for name in unknown)
        raise InputError(*told)


def load_adapter(model: Any, folder: str | Path) -> Any:
    """A saved adapter on its base model, to be trained further. Errors: InputError where it does not fit."""
    from peft import PeftModel

    if not (Path(folder) / "adapter_model.safetensors").is_file():  # peft would read pickled weights
        raise InputError(f"{folder}: the adapter has no adapter_model.safetensors")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # peft only warns about missing keys
            warnings.simplefilter("ignore", FutureWarning)
            adapted = PeftModel.from_pretrained(model, str(folder), adapter_name=TRAINED, is_trainable=True)
    except Exception as error:  # peft raises a dozen kinds
        raise InputError(f"{folder}: the adapter does not fit its base: {first_line(error)}") from error
    if (Path(folder) / "generation_config.json").is_file():  # its own, not that of the base
        adapted.get_base_model().generation_config = GenerationConfig.from_pretrained(folder)
    return _ready(adapted)


def _ready(adapted: Any) -> Any:
    """The same model without dropout, and without casts to the adapter's float32, which autocast would only undo."""
    switch_dropout_off(adapted)
    for layer in adapted.modules():
        if not getattr(layer, "lora_variant", True):  # a plain one
            layer.cast_input_dtype_enabled = False
    return adapted


class AdapterReference(LM):
    """The frozen starting point inside a model with an adapter: no second copy of the weights.

    For a policy that started without an adapter, it is the model with the adapter off. For one that started with an
    adapter, it is a second, frozen copy of that adapter.
    """

    def __init__(self, policy: Any, dtype: torch.dtype = torch.float32, *, keep_start: bool) -> None:
        super().__init__(policy, dtype, active=self._at_start)
        self.keep_start, self._switched = keep_start, False
        if keep_start:
            policy.add_adapter(KEPT, policy.peft_config[TRAINED])
            with torch.no_grad():
                state = dict(policy.named_parameters())
                for name, parameter in state.items():
                    if f".{KEPT}." in name:
                        parameter.copy_(state[name.replace(f".{KEPT}.", f".{TRAINED}.")])
            policy.set_adapter(TRAINED)
        self._start = {
            f"model.{name}": parameter.detach().clone()
            for name, parameter in policy.named_parameters()
            if f".{TRAINED}." in name
        }

    @contextlib.contextmanager
    def _at_start(self) -> Iterator[None]:
        if self._switched:  # sampling reads the head within a context for all of its steps
            yield
            return
        self._switched = True
        try:
            if self.keep_start:
                self.model.set_adapter(KEPT)
            with contextlib.nullcontext() if self.keep_start else self.model.disable_adapter():
                yield
        finally:
            self._switched = False
            if self.keep_start:
                self.model.set_adapter(TRAINED)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The tensors that it reads, none of which is trained."""
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if f".{TRAINED}." not in name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's tensors as they were at the start."""
        return {**super().state_dict(*args, **kwargs), **self._start}


def active_adapter(model: LM) -> str | None:
    """The adapter with which a model is read, if any."""
    if isinstance(model, AdapterReference):
        return KEPT if model.keep_start else None
    return TRAINED if has_adapter(model.model) else None


def checkpointed(model: nn.Module) -> nn.Module:
    """The tensors for a checkpoint of a model: all of them, or only the trained ones if the others are frozen."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return model
    view = nn.Module()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            view.register_parameter(name.replace(".", "/"), parameter)
    return view


def merge(adapted: Any) -> Any:
    """The base model with the adapter merged into its weights: a close result, not an equal one."""
    return adapted.merge_and_unload().eval()
