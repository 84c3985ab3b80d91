"""Writes `final/`, the model of a finished `train` run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlhf_kl.commands.build import Parts
from rlhf_kl.models.load import save_model
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.run.folders import write_folder
from rlhf_kl.sharding import tensors_of


def write_final(folder: Path, model: ActorCritic, parts: Parts, card: str, *, keep: bool) -> None:
    """A folder that plain transformers loads, with a model card; the value function in a file of its own.

    All processes call it together, since each may hold a part of the weights; the one with `keep` writes.
    """
    policy: Any = model.policy.module
    tensors = tensors_of(policy, keep=keep) if parts.sharded else None
    value = {
        f"{part}.{name}": tensor
        for part, module in (("value", model.value), ("critic", model.critic))
        if module is not None
        for name, tensor in tensors_of(module, keep=keep).items()
    }

    def write(place: Path) -> None:
        policy.generation_config.eos_token_id = parts.sampling.eos_ids
        policy.generation_config.pad_token_id = parts.sampling.pad_id
        save_model(policy, parts.tokenizer, place, tensors)
        save_file(value, place / "value.safetensors")
        (place / "README.md").write_text(card, encoding="utf-8")

    if keep:
        write_folder(folder, write)
