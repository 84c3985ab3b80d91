"""KL controllers: floats in, beta out. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_kl.kl_controllers.adaptive import AdaptiveKL
from rlhf_kl.kl_controllers.base import KLController
from rlhf_kl.kl_controllers.control import KLControl
from rlhf_kl.kl_controllers.dual import DualKL
from rlhf_kl.kl_controllers.exponential import ExponentialKL
from rlhf_kl.kl_controllers.fixed import FixedKL
from rlhf_kl.kl_controllers.pid import PIDKL
from rlhf_kl.kl_controllers.proportional import ProportionalKL
from rlhf_kl.kl_controllers.schedule import ScheduledKL
from rlhf_kl.kl_controllers.threshold import ThresholdKL

CONTROLLERS: dict[str, type[KLController]] = {
    "adaptive": AdaptiveKL,
    "dual": DualKL,
    "exponential": ExponentialKL,
    "fixed": FixedKL,
    "pid": PIDKL,
    "proportional": ProportionalKL,
    "schedule": ScheduledKL,
    "static": FixedKL,
    "threshold": ThresholdKL,
}


def build_controller(kind_class: Callable[..., Any], options: Mapping[str, Any], **context: Any) -> Any:
    """`kind_class(**options)`, with each context value that it takes by name and the options leave out.

    context: target, coef, total_episodes, batch_size, min_coef, max_coef; None = not known.
    Raises what the class raises: ValueError on values that make no sense.
    """
    parameters = inspect.signature(kind_class).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    filled = {k: v for k, v in context.items() if v is not None and (takes_any or k in parameters)}
    return kind_class(**{**filled, **options})


__all__ = [
    "CONTROLLERS",
    "PIDKL",
    "AdaptiveKL",
    "DualKL",
    "ExponentialKL",
    "FixedKL",
    "KLControl",
    "KLController",
    "ProportionalKL",
    "ScheduledKL",
    "ThresholdKL",
    "build_controller",
]
