"""What a finished run leaves: `final/` with its model card, and with `--merge` a merged adapter, `merged/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_kl.config.schema import RewardModelConfig, SFTConfig, TrainConfig
from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.errors import InputError
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.models.pretrained import save_generation, save_model
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.monitors.facts import is_update
from rlhf_kl.rewards.model import save_reward_model
from rlhf_kl.run.folder import RunFolder, write_folder
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.sharding import has_shards, tensors_of
from rlhf_kl.training.card import model_card
from rlhf_kl.training.load import Loader
from rlhf_kl.training.setup import Setup
from rlhf_kl.ui import log


def write_final(folder: Path, model: ActorCritic, setup: Setup, card: str, *, keep: bool) -> None:
    """A folder that plain transformers loads, with a model card; the value function in a file of its own.

    All processes call it together, since each may hold a part of the weights; the one with `keep` writes.
    """

    def whole(module: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in tensors_of(module) if keep}

    parts = model.modules
    policy: Any = parts.pop("policy")
    tensors, value = whole(policy) if has_shards(policy) else None, whole(parts)

    def write(place: Path) -> None:
        save_model(policy, setup.tokenizer, place, tensors)
        save_file(value, place / "value.safetensors")
        (place / "README.md").write_text(card, encoding="utf-8")

    if keep:
        if changed := save_generation(policy, setup.sampling):
            log.info(f"{folder.name}/generation_config.json is that of the rollouts: {changed}")
        write_folder(folder, write)


def require_adapter(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Errors: InputError if the run trains a whole model; called before the run."""
    model = config.policy.model
    # A reward model begins with the adapter of its language model merged.
    local = model is not None and Path(model).is_dir() and not isinstance(config, RewardModelConfig)
    if config.policy.lora is None and not (local and is_adapter(str(model))):
        raise InputError("--merge: the run trains no adapter, so final/ is already the whole model: leave --merge out")


def merge_final(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Write `merged/` from `final/`."""
    folder = RunFolder(Path(config.run.output_dir))
    loader, final = Loader(config.run, "cpu"), str(folder.final)
    if isinstance(config, RewardModelConfig):
        reward = loader.reward_model(final, "--merge", ScorerSection())
        write_folder(folder.merged, lambda place: save_reward_model(reward, place))
    else:
        loaded = loader.language_model(final, "--merge")

        def write(place: Path) -> None:
            save_model(loaded.model, loaded.tokenizer, place)
            if isinstance(config, TrainConfig):
                rows = list(read_jsonl(folder.metrics))
                card = model_card(config, [row for row in rows if is_update(row)], rows[-1], adapter=False)
                (place / "README.md").write_text(card, encoding="utf-8")

        write_folder(folder.merged, write)
    log.info(f"{folder.merged} holds the merged model")
