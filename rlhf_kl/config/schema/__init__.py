"""Every key that a config may hold, with its default and its meaning."""

from typing import Literal, TypeAlias

from rlhf_kl.config.schema.sections import Section, section_of
from rlhf_kl.config.schema.supervised import RewardModelConfig, SFTConfig
from rlhf_kl.config.schema.training import TrainConfig

Kind: TypeAlias = Literal["train", "sft", "reward-model"]
AnyConfig: TypeAlias = TrainConfig | SFTConfig | RewardModelConfig
MODELS: dict[Kind, type[TrainConfig] | type[SFTConfig] | type[RewardModelConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
}

__all__ = ["MODELS", "AnyConfig", "Kind", "RewardModelConfig", "SFTConfig", "Section", "TrainConfig", "section_of"]
