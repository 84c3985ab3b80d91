"""`--merge`: writes the merged model beside the adapter, to be loaded without peft."""

from __future__ import annotations

from pathlib import Path

from rlhf_kl.commands.card import model_card
from rlhf_kl.commands.load import Loader
from rlhf_kl.config.schema import RewardModelConfig, ScorerSection, SFTConfig, TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.models.load import save_model
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.report.control import is_update
from rlhf_kl.rewards.model import save_reward_model
from rlhf_kl.run.folders import write_folder
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.ui import log

MERGED = "merged"


def require_adapter(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Errors: InputError if the run trains a whole model; called before the run."""
    model = config.policy.model
    # A reward model begins with the adapter of its language model merged.
    local = model is not None and Path(model).is_dir() and not isinstance(config, RewardModelConfig)
    if config.policy.lora is None and not (local and is_adapter(str(model))):
        raise InputError("--merge: the run trains no adapter, so final/ is already the whole model: leave --merge out")


def merge_final(config: TrainConfig | SFTConfig | RewardModelConfig) -> Path:
    """Write `merged/` from `final/`; returns the folder."""
    folder = Path(config.run.output_dir)
    loader = Loader.for_run(config.run, "cpu")
    final = str(folder / "final")
    if isinstance(config, RewardModelConfig):
        reward = loader.reward_model(final, "--merge", ScorerSection())
        write_folder(folder / MERGED, lambda place: save_reward_model(reward, place))
    else:
        loaded = loader.language_model(final, "--merge")
        card = _card(config, folder) if isinstance(config, TrainConfig) else None

        def write(place: Path) -> None:
            save_model(loaded.model, loaded.tokenizer, place)
            if card is not None:
                (place / "README.md").write_text(card, encoding="utf-8")

        write_folder(folder / MERGED, write)
    log.info(f"{folder / MERGED} holds the merged model")
    return folder / MERGED


def _card(config: TrainConfig, folder: Path) -> str:
    rows = list(read_jsonl(RunFolder(folder).metrics))
    return model_card(config, [row for row in rows if is_update(row)], rows[-1], adapter=False)
