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
    from rlhf_kl.ops.kl import absolute, importance, k1, k2, k3, kl_penalty, rewards_with_kl
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
_RENAMED = {"ProportionalKL": "ZieglerKL"}  # still importable
_HOMES = {
    **dict.fromkeys(_CONTROLLERS, "rlhf_kl.kl_controllers"),
    **dict.fromkeys(("k1", "k2", "k3", "absolute", "importance", "kl_penalty", "rewards_with_kl"), "rlhf_kl.ops.kl"),
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
    "absolute",
    "exact_kl",
    "importance",
    "k1",
    "k2",
    "k3",
    "kl_penalty",
    "rewards_with_kl",
]


def __getattr__(name: str) -> Any:
    current = _RENAMED.get(name, name)
    if current not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[current]), current)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
