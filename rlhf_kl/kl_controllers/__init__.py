"""KL controllers: floats in, beta out. No torch."""

from rlhf_kl.kl_controllers.adaptive import AdaptiveKL
from rlhf_kl.kl_controllers.base import KLController
from rlhf_kl.kl_controllers.dual import DualKL
from rlhf_kl.kl_controllers.exponential import ExponentialKL
from rlhf_kl.kl_controllers.factory import CONTROLLERS, adjusts, build_controller
from rlhf_kl.kl_controllers.fixed import FixedKL
from rlhf_kl.kl_controllers.guarded import GuardedController
from rlhf_kl.kl_controllers.pid import PIDKL
from rlhf_kl.kl_controllers.schedule import ScheduledKL
from rlhf_kl.kl_controllers.threshold import ThresholdKL
from rlhf_kl.kl_controllers.ziegler import ZieglerKL

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
