"""Opens a run's folder, with permissions to run other people's code: its config, policy, reference and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rlhf_kl.commands.load import Loaded, Loader
from rlhf_kl.commands.world import GOLD, world_file
from rlhf_kl.config.load import load_run_config
from rlhf_kl.config.plugins import plugins_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError, blame, suggestion
from rlhf_kl.models.lora import checkpointed
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints, newest_whole
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.seeding import derive_seed


@dataclass(frozen=True)
class Permissions:
    """Permissions that the command line gives; those in the folder's config do not count."""

    plugins: bool = False
    remote_code: bool = False
    pickle: bool = False

    def run_config(self, folder: RunFolder) -> TrainConfig:
        """The config of a run with these permissions and no others. Errors: InputError if there is no run."""
        folder.require_run()
        config = load_run_config(folder.config, plugins=self.plugins)
        run = config.run.model_copy(update={"trust_remote_code": False, "allow_pickle": False})
        return self.added_to(config.model_copy(update={"run": run}))

    def added_to(self, config: TrainConfig) -> TrainConfig:
        """A config that the user chose, with these permissions beside its own."""
        names = {"trust_remote_code": self.remote_code, "allow_pickle": self.pickle}
        run = config.run.model_copy(update={name: True for name, allowed in names.items() if allowed})
        return config.model_copy(update={"run": run})

    def refused(self, config: TrainConfig) -> tuple[list[str], list[str]]:
        """The plugins that have no permission: those for scores, and those for gold scores."""
        named = [plugin for plugin in plugins_of(config) if plugin.ref != GOLD]  # which is this program's own
        found = {plugin.key: plugin.ref for plugin in named if plugin.key.startswith("reward.")}
        gold = found.pop("reward.gold", None)
        return ([], []) if self.plugins else (list(found.values()), [gold] if gold else [])


NO_PERMISSIONS = Permissions()


def load_policy(
    loader: Loader, config: TrainConfig, folder: RunFolder | None, model: str | None, step: int | None
) -> tuple[Any, Any]:
    """`model` and its tokenizer; else a run's final model, a checkpoint, or (no folder) start. Errors: InputError."""
    if model is not None:
        named = loader.language_model(world_file(located(model), "policy"), "--model")
        return named.model, named.tokenizer
    if folder is not None and folder.final.is_dir() and step is None:
        final = loader.language_model(str(folder.final), "--run")
        return final.model, final.tokenizer
    section = config.policy
    seed = derive_seed(config.run.seed, "adapter")
    loaded = loader.trained_model(section.model, section.lora, seed)
    if folder is not None:
        checkpoint, holder = _checkpoint(folder, step), nn.Module()
        holder.policy = loaded.model  # as in a checkpoint, beside the value function
        with blame(str(checkpoint.path)):
            checkpoint.load_model(checkpointed(holder))
    return loaded.model, loaded.tokenizer


def load_run_reference(loader: Loader, config: TrainConfig, other: str | None = None) -> Loaded:
    """The reference of a run, or another model in its place."""
    ref = other or config.reference.model or config.policy.model
    return loader.language_model(world_file(located(ref), "policy"), "--reference" if other else "reference")


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
