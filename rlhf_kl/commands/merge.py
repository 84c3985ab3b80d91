"""`--merge`: beside the adapter of a run the whole model, for those who load it without peft."""

from __future__ import annotations

from pathlib import Path

from rlhf_kl.checkpoint import write_folder
from rlhf_kl.commands.models import load_language_model
from rlhf_kl.commands.sources import Sources, access_of
from rlhf_kl.config.schema import SFTConfig, TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.models.load import save_model
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.tracking.display import TrainingDisplay

MERGED = "merged"


def require_adapter(config: TrainConfig | SFTConfig) -> None:
    """Errors: InputError where the run trains a whole model, known before it starts."""
    model = config.policy.model
    local = model is not None and Path(model).is_dir()
    if config.policy.lora is None and not (local and is_adapter(str(model))):
        raise InputError(
            "--merge: the run trains no adapter, so final/ is the whole model: set policy.lora, or leave it"
        )


def merge_final(config: TrainConfig | SFTConfig, display: TrainingDisplay) -> Path:
    """Write `merged/` from `final/`; returns the folder."""
    folder = Path(config.run.output_dir)
    sources = Sources(display, access=access_of(config.run))
    loaded = load_language_model(sources, str(folder / "final"), "--merge")
    write_folder(folder / MERGED, lambda place: save_model(loaded.model, loaded.tokenizer, place))
    display.message(f"{folder / MERGED} holds the merged model")
    return folder / MERGED
