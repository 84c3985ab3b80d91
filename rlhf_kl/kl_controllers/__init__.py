"""KL controllers: floats in, beta out. No torch."""

from rlhf_kl.kl_controllers.adaptive import AdaptiveKL
from rlhf_kl.kl_controllers.base import KLController
from rlhf_kl.kl_controllers.factory import CONTROLLERS, adjusts, build_controller
from rlhf_kl.kl_controllers.guarded import GuardedController
from rlhf_kl.kl_controllers.laws import DualKL, ExponentialKL, FixedKL, ScheduledKL, ThresholdKL, ZieglerKL
from rlhf_kl.kl_controllers.pid import PIDKL

__all__ = [
    "CONTROLLERS",
    "PIDKL",
    "AdaptiveKL",
    "DualKL",
    "ExponentialKL",
    "FixedKL",
    "GuardedController",
    "KLController",
    "ScheduledKL",
    "ThresholdKL",
    "ZieglerKL",
    "adjusts",
    "build_controller",
]
