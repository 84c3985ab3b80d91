"""What moves the KL. Floats in, floats out; this module needs no torch, while `ceiling`, `rate` and `way` do.

In the order of an update:

    who            moves                        when                             knows
    Progress       nothing; says whether the    after the rollout                its score and KL, the reference's score
                   score rises with the KL
    LearningRate   the rate: it paces the way   before the steps of the          the rollout's KL; after the steps also
                   to the target, later only    optimizer                        how far they went
                   falls
    Ceiling.hold   the weights: back, until     after these steps                the KL at the rollout's states; a
                   the next rollout's KL is                                      forecast of the next rollout's
                   forecast below the limit
    Law            beta: it holds the KL        then, from the second update of  all of the above, as floats
                                                the policy on
    Ceiling.scale  the weights: to the share    last, where the way from the     the law's share
                   of their distance that       reference is known
                   `Law.scale` keeps

A `Guard` holds the law, a class of ours or of the user's, and keeps beta valid. `adaptive` divides the work: the rate
brings the policy to the target, the scaling ends an overshoot at once, and beta follows only what lasts. `verdict`
judges how well a run held its target, `tilt` what a KL can buy, `plant` simulates a policy.
"""

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
