"""RLHF on a KL budget: PPO that holds a target KL to a frozen reference model.

The names below are loaded when they are first used: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kl.control import (
        PIDKL,
        AdaptiveKL,
        DualKL,
        ExponentialKL,
        FixedKL,
        KLController,
        ScheduledKL,
        ThresholdKL,
        ZieglerKL,
    )
    from rlhf_kl.errors import RlhfKlError
    from rlhf_kl.ops.kl import importance, k1, k2, k3, kl_penalty, rewards_with_kl
    from rlhf_kl.ops.logprobs import exact_kl
    from rlhf_kl.python.ppo import PPO
    from rlhf_kl.python.trained import TrainedRun, train

_HOMES = {
    **dict.fromkeys(("k1", "k2", "k3", "importance", "kl_penalty", "rewards_with_kl"), "rlhf_kl.ops.kl"),
    "exact_kl": "rlhf_kl.ops.logprobs",
    "train": "rlhf_kl.python.trained",
    "TrainedRun": "rlhf_kl.python.trained",
    "PPO": "rlhf_kl.python.ppo",
    "RlhfKlError": "rlhf_kl.errors",
}

__all__ = [
    "PIDKL",
    "PPO",
    "AdaptiveKL",
    "DualKL",
    "ExponentialKL",
    "FixedKL",
    "KLController",
    "RlhfKlError",
    "ScheduledKL",
    "ThresholdKL",
    "TrainedRun",
    "ZieglerKL",
    "exact_kl",
    "importance",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "rewards_with_kl",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "rlhf_kl.control")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
