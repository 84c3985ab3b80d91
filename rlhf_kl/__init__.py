"""RLHF on a KL budget: PPO that holds a target KL to a frozen reference model.

The names below are loaded when they are first used: importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kl.kl_controllers import (
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
    from rlhf_kl.ops.kl import importance, k1, k2, k3, kl_penalty, rewards_with_kl
    from rlhf_kl.ops.logprobs import exact_kl

_CONTROLLERS = (
    "KLController",
    "AdaptiveKL",
    "DualKL",
    "ExponentialKL",
    "FixedKL",
    "PIDKL",
    "ScheduledKL",
    "ThresholdKL",
    "ZieglerKL",
)
_HOMES = {
    **dict.fromkeys(_CONTROLLERS, "rlhf_kl.kl_controllers"),
    **dict.fromkeys(("k1", "k2", "k3", "importance", "kl_penalty", "rewards_with_kl"), "rlhf_kl.ops.kl"),
    "exact_kl": "rlhf_kl.ops.logprobs",
}

__all__ = [
    "PIDKL",
    "AdaptiveKL",
    "DualKL",
    "ExponentialKL",
    "FixedKL",
    "KLController",
    "ScheduledKL",
    "ThresholdKL",
    "ZieglerKL",
    "exact_kl",
    "importance",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "rewards_with_kl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
