"""KL controllers: floats in, beta out. No torch. A `Guard` holds a `Law`, a class of ours or of the user's."""

from rlhf_kl.control.adaptive import AdaptiveKL
from rlhf_kl.control.base import Law, resolve_bounds
from rlhf_kl.control.build import (
    CONTROLLER_PROVIDED,
    CONTROLLERS,
    SYNONYMS,
    adjusts,
    build_controller,
    builtin_law,
    law_class,
    law_options,
    load_controller,
    make_controller,
    option_names,
    stored_name,
)
from rlhf_kl.control.guard import Guard
from rlhf_kl.control.laws import PIDKL, DualKL, ExponentialKL, FixedKL, ScheduledKL, ThresholdKL, ZieglerKL

KLController = Law  # its public name: a class of the user's may extend it

__all__ = [
    "CONTROLLERS", "CONTROLLER_PROVIDED", "PIDKL", "SYNONYMS", "AdaptiveKL", "DualKL", "ExponentialKL", "FixedKL",
    "Guard", "KLController", "Law", "ScheduledKL", "ThresholdKL", "ZieglerKL", "adjusts", "build_controller",
    "builtin_law", "law_class", "law_options", "load_controller", "make_controller", "option_names", "resolve_bounds",
    "stored_name",
]  # fmt: skip
