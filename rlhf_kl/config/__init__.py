"""Configuration: what may be written (`schema`), and how a file becomes a checked object (`load`)."""

from rlhf_kl.config.load import (
    config_diff,
    detect_kind,
    dump_config,
    find_config,
    json_schema,
    load_any,
    load_config,
)
from rlhf_kl.config.plugins import configured_controller, controller_class, plugin_files
from rlhf_kl.config.schema import KIND_NAMES, Kind, RewardModelConfig, SFTConfig, TrainConfig

__all__ = [
    "KIND_NAMES",
    "Kind",
    "RewardModelConfig",
    "SFTConfig",
    "TrainConfig",
    "config_diff",
    "configured_controller",
    "controller_class",
    "detect_kind",
    "dump_config",
    "find_config",
    "json_schema",
    "load_any",
    "load_config",
    "plugin_files",
]
