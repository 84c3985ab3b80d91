"""KL controllers: floats in, beta out. No torch. Here: their names, and how one is built for a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_kl.control.adaptive import AdaptiveKL
from rlhf_kl.control.base import COEF_SPAN, CONTROLLER_PROVIDED, KLController, clip, resolve_bounds
from rlhf_kl.control.foreign import as_controller, law_options, names_of_options
from rlhf_kl.control.laws import PIDKL, DualKL, ExponentialKL, FixedKL, ScheduledKL, ThresholdKL, ZieglerKL

CONTROLLERS: dict[str, type[KLController]] = {
    "adaptive": AdaptiveKL,
    "dual": DualKL,
    "exponential": ExponentialKL,
    "fixed": FixedKL,
    "pid": PIDKL,
    "schedule": ScheduledKL,
    "threshold": ThresholdKL,
    "ziegler": ZieglerKL,
}
SYNONYMS = {"static": "fixed", "proportional": "ziegler"}

BOUNDS = {"min_coef", "max_coef"}  # of beta; the program keeps them for every class
COEF_WITHOUT_SCORES = 0.1  # `coef: auto` without scores


def adjusts(kind: str) -> bool:
    """Whether the beta of this kind of controller depends on the KL; assumed for a user's own class."""
    known = CONTROLLERS.get(stored_name(kind))
    return known is None or known.adjusts


def build_controller(
    kind: str | Callable[..., Any],
    options: Mapping[str, Any],
    *,
    target: float | None = None,
    coef: float = COEF_WITHOUT_SCORES,
    total_episodes: int | None = None,
    batch_size: int | None = None,
) -> KLController:
    """The controller `kind(**options)`, ready for a run.

    kind: a built-in's name, or any class with `coef` and `update(kl, episodes)`, or their other usual names.
    options: those of the user. A `coef` among them is the starting beta and must lie inside the bounds,
    `min_coef` and `max_coef`, which hold for every class, also for one that does not take them.
    The other arguments are passed on if the class takes them and the options do not set them; None = not known.
    `coef` is then the value of `auto`: it is moved inside the bounds. Nats are in the target's unit.
    Raises ValueError and TypeError: no such kind, or values that the class refuses.
    """
    if isinstance(kind, str) and stored_name(kind) not in CONTROLLERS:
        raise ValueError(f"no controller is called {kind!r}; available: {', '.join(CONTROLLERS)}")
    cls = CONTROLLERS[stored_name(kind)] if isinstance(kind, str) else kind
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def bound(name: str) -> float | None:
        value = options.get(name, parameters[name].default if name in parameters else None)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    low, high = bound("min_coef"), bound("max_coef")
    start = clip(coef, -math.inf if low is None else low, math.inf if high is None else high)
    called = {name: name for name in CONTROLLER_PROVIDED} | names_of_options(list(parameters))
    lowest, highest = (factor * options.get(called["coef"], start) for factor in COEF_SPAN)
    known = {
        "target": target, "coef": start, "total_episodes": total_episodes, "batch_size": batch_size,
        "min_coef": lowest if low is None else low, "max_coef": highest if high is None else high,
    }  # fmt: skip

    def takes(name: str) -> bool:
        return name in parameters or (takes_any and name not in BOUNDS)

    arguments = {called[name]: value for name, value in known.items() if value is not None and takes(called[name])}
    arguments |= {name: value for name, value in options.items() if name not in BOUNDS or takes(name)}
    return as_controller(cls(**arguments), low, high, None if called["coef"] in options else coef)


def stored_name(kind: str) -> str:
    """The name under which a kind is stored."""
    return SYNONYMS.get(kind, kind)


__all__ = [
    "CONTROLLERS", "CONTROLLER_PROVIDED", "PIDKL", "AdaptiveKL", "DualKL", "ExponentialKL", "FixedKL", "KLController",
    "ScheduledKL", "ThresholdKL", "ZieglerKL", "adjusts", "as_controller", "build_controller", "law_options",
    "resolve_bounds",
]  # fmt: skip
