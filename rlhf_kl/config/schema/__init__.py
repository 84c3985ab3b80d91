"""Every key that a config may hold, with its default and its meaning."""

from typing import Literal, TypeAlias

from rlhf_kl.config.schema.base import (
    SEEDS,
    EpochsSection,
    LoraSection,
    RunSection,
    Section,
    section_of,
)
from rlhf_kl.config.schema.kl import ControllerSection, KLSection
from rlhf_kl.config.schema.reward import SUM, RewardSection, ScorerSection, TermSection
from rlhf_kl.config.schema.supervised import (
    ArchitectureSection,
    PairsSection,
    RewardModelConfig,
    RewardModelSection,
    SFTConfig,
    SFTDataSection,
    SFTSection,
)
from rlhf_kl.config.schema.train import (
    EvalSection,
    PPOSection,
    PromptsSection,
    RolloutSection,
    TrainConfig,
)

Kind: TypeAlias = Literal["train", "sft", "reward-model"]
AnyConfig: TypeAlias = TrainConfig | SFTConfig | RewardModelConfig
MODELS: dict[Kind, type[TrainConfig] | type[SFTConfig] | type[RewardModelConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
}

# fmt: off
__all__ = [
    "MODELS", "SEEDS", "SUM", "AnyConfig", "ArchitectureSection", "ControllerSection", "EpochsSection",
    "EvalSection", "KLSection", "Kind", "LoraSection", "PPOSection", "PairsSection", "PromptsSection",
    "RewardModelConfig", "RewardModelSection", "RewardSection", "RolloutSection", "RunSection", "SFTConfig",
    "SFTDataSection", "SFTSection", "ScorerSection", "Section", "TermSection", "TrainConfig", "section_of",
]
# fmt: on
