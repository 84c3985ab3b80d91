"""Loads the language models that a config or a command line names: whole models, adapters and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import nn

from rlhf_kl.config.schema import ArchitectureSection, LoraSection, TrainConfig
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.models.lm import enable_recompute
from rlhf_kl.models.load import (
    Access,
    check_label,
    is_classifier,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
)
from rlhf_kl.models.lora import (
    adapter_base,
    add_adapter,
    checkpointed,
    is_adapter,
    load_adapter,
    merge,
    require_classifier_adapter,
)
from rlhf_kl.models.scratch import classifier_from_lm, new_gpt2, train_tokenizer
from rlhf_kl.rewards.model import remember_format
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints, newest_whole
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.seeding import derive_seed
from rlhf_kl.sharding import load_tensors


class ModelFolders(Protocol):
    """Finds the folders of the models that a config names: a `Resolver`."""

    access: Access

    def folder(self, ref: str, key: str, /) -> str:
        """The local folder of a model. Errors: InputError."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A causal language model with its tokenizer."""

    model: Any
    tokenizer: Any
    folder: str  # of the model, or of its adapter
    began_as_adapter: bool


def load_language_model(resolver: ModelFolders, ref: str, key: str, *, keep_adapter: bool = False) -> Loaded:
    """The model behind a folder or hub id; an adapter is merged into its base unless `keep_adapter`.

    Errors: InputError with the reason.
    """
    folder, access = resolver.folder(ref, key), resolver.access
    if not is_adapter(folder):
        return Loaded(load_causal_lm(folder, key, access), load_tokenizer(folder, key, access), folder, False)
    base = load_language_model(resolver, adapter_base(folder, key), key)  # which may itself be an adapter
    model = load_adapter(base.model, folder, key)
    tokenizer = _own_tokenizer(folder, base, key, access)
    return Loaded(model if keep_adapter else merge(model), tokenizer, folder, True)


def load_classifier_adapter(resolver: ModelFolders, folder: str, key: str, label: str | None) -> tuple[Any, Any]:
    """The merged classifier of an adapter's folder, and its tokenizer; the base may be a language model.

    Errors: InputError with the reason.
    """
    require_classifier_adapter(folder, key)
    ref = adapter_base(folder, key)
    base, access = resolver.folder(ref, key), resolver.access
    if is_classifier(base, key):
        tokenizer = load_tokenizer(base, key, access)
        model = load_reward_model(base, key, access, label)
        loaded = Loaded(model, tokenizer, base, False)
    else:
        lm = load_language_model(resolver, ref, key)
        model = classifier_from_lm(lm.model, lm.tokenizer, key, access)  # its head comes with the adapter
        loaded = Loaded(model, lm.tokenizer, lm.folder, False)
        check_label(model, folder, key, label)
    merged = merge(load_adapter(loaded.model, folder, key))
    remember_format(merged, folder)
    return merged, _own_tokenizer(folder, loaded, key, access)


def _own_tokenizer(folder: str, base: Loaded, key: str, access: Access) -> Any:
    """The tokenizer beside an adapter, else that of its base."""
    has_one = (Path(folder) / "tokenizer_config.json").is_file()
    return load_tokenizer(folder, key, access) if has_one else base.tokenizer


def adapter_ref(ref: str, loaded: Loaded) -> str:
    """The base in a fresh adapter's config: the folder of a local model, else the hub id."""
    return loaded.folder if Path(ref).is_dir() else ref


def new_language_model(shape: ArchitectureSection, texts: Sequence[str], seed: int) -> tuple[Any, Any]:
    """A GPT-2 with random weights, and a tokenizer trained on `texts`; `seed` is the run's."""
    tokenizer = train_tokenizer(texts, shape.vocab_size, shape.context)
    model = new_gpt2(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        context=shape.context,
        tokenizer=tokenizer,
        seed=derive_seed(seed, "weights"),
    )
    return model, tokenizer


def load_trained_model(
    resolver: ModelFolders,
    ref: str,
    lora: LoraSection | None,
    key: str,
    *,
    seed: int,
    gradient_checkpointing: bool = False,
) -> Loaded:
    """A model to be trained: with a fresh adapter where the config names one; an adapter is trained further.

    `seed`: for the weights of a fresh adapter.
    """
    loaded = load_language_model(resolver, ref, key, keep_adapter=lora is None)
    if lora is not None:
        model = add_adapter(
            loaded.model,
            r=lora.r,
            alpha=lora.alpha,
            target_modules=lora.target_modules,
            ref=adapter_ref(ref, loaded),
            what=key.replace("model", "lora"),
            seed=seed,
        )
        loaded = Loaded(model, loaded.tokenizer, loaded.folder, False)
    if gradient_checkpointing:
        enable_recompute(loaded.model, key.replace("model", "gradient_checkpointing"))
    return loaded


def load_run_policy(
    resolver: ModelFolders, config: TrainConfig, folder: RunFolder | None, step: int | None = None
) -> tuple[Any, Any]:
    """The policy and tokenizer of a run: its final model, a checkpoint, or (no folder) its starting policy.

    Errors: InputError if the run has no such checkpoint, or neither a checkpoint nor a final model.
    """
    if folder is not None and folder.final.is_dir() and step is None:
        final = load_language_model(resolver, str(folder.final), "--run")
        return final.model, final.tokenizer
    section = config.policy
    seed = derive_seed(config.run.seed, "adapter")
    loaded = load_trained_model(resolver, section.model, section.lora, "policy.model", seed=seed)
    if folder is not None:
        load_policy(_checkpoint(folder, step), loaded.model)
    return loaded.model, loaded.tokenizer


def load_run_reference(resolver: ModelFolders, config: TrainConfig, other: str | None = None) -> Loaded:
    """The reference of a run, or another model in its place."""
    ref = located(other or config.reference.model or config.policy.model)
    return load_language_model(resolver, ref, "reference")


def load_policy(checkpoint: Checkpoint, policy: Any) -> None:
    """The policy's weights out of a checkpoint of policy and value function."""
    holder = nn.Module()
    holder.policy = policy
    try:
        load_tensors(checkpointed(holder), load_file(checkpoint.path / "model.safetensors"))
    except InputError as error:
        raise InputError(f"{checkpoint.path}: does not fit the policy: {error}") from error


def _checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    if step is None:
        newest, _ = newest_whole(folder.checkpoints)
        if newest is None:
            raise InputError(f"{folder.path}: holds neither a final model nor a checkpoint")
        return newest
    present = {checkpoint.step: checkpoint for checkpoint in checkpoints(folder.checkpoints)}
    if step not in present:
        hint = suggestion(str(step), [str(known) for known in present])
        raise InputError(f"--checkpoint {step}: {folder.path} has no such checkpoint{hint}")
    problem = present[step].damage()
    if problem is not None:
        raise InputError(f"--checkpoint {step}: {present[step].path}: {problem}")
    return present[step]


def located(ref: str) -> str:
    """An existing path of the command line, made absolute; anything else unchanged."""
    path = Path(ref).expanduser()
    return str(path.absolute()) if path.exists() else ref
