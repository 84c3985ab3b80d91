"""Problems that prevent a KL budget in a TRL trainer, and settings that make its measured KL unreliable."""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

from rlhf_kl.errors import suggestion

TESTED = "1.16.0"
FITS = "1.16."  # the trainers' private attributes that are read here may change with any minor version
ESTIMATES = {"GRPOTrainer": "k3", "RLOOTrainer": "k1"}  # of the KL that each logs
UNITS = ("token", "sequence")


def estimate_of(trainer: Any) -> str | None:
    """The estimator behind the KL that `trainer` logs; None for a trainer that is neither GRPO nor RLOO."""
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.trainer.")]
    return next((ESTIMATES[name] for name in names if name in ESTIMATES), None)


def problems(trainer: Any, target: Any, unit: Any, *, attached: bool) -> list[str]:
    """Every problem, one line each, with how to fix it."""
    version = _version()
    if version is None:
        return [f"kl-budget: TRL is not installed: pip install 'trl=={TESTED}'"]
    if not version.startswith(FITS):
        return [f"kl-budget: TRL {version} is installed, {FITS}* is needed: pip install 'trl=={TESTED}'"]
    name = type(trainer).__name__
    if estimate_of(trainer) is None:
        return [f"kl-budget: it holds the KL of {' and '.join(ESTIMATES)}; {name} is neither"]
    found = []
    if attached:
        found.append("kl-budget: this trainer already has a KL budget: attach one")
    if not trainer.beta:
        found.append(
            f"kl-budget: beta is 0, so {name} has no reference model and logs no KL: "
            f"{name.removesuffix('Trainer')}Config(beta=0.04) sets the starting beta"
        )
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0.0 < target < math.inf:
        found.append(f"kl-budget: target must be a number of nats above 0, got {target!r}")
    if unit not in UNITS:
        found.append(f"kl-budget: unknown unit {unit!r}{suggestion(str(unit), UNITS)}")
    if trainer.args.restore_callback_states_from_checkpoint:
        found.append(
            "kl-budget: restore_callback_states_from_checkpoint creates callbacks without their trainer: remove it; "
            "the budget restores itself"
        )
    return found


def doubts(trainer: Any) -> list[str]:
    """Settings that change the meaning of the measured KL, `name: text` each."""
    args = trainer.args
    found = []
    if args.top_k or args.top_p != 1.0 or args.min_p or args.repetition_penalty != 1.0:
        found.append(
            "sampling: top_k, top_p, min_p or repetition_penalty change the policy that samples, so the estimated KL "
            "may be too low, or below 0"
        )
    if args.sync_ref_model:
        found.append("moving-reference: sync_ref_model changes the reference; the budget is the KL to the current one")
    dropout = any(
        getattr(module, "p", 0.0) > 0.0 for module in trainer.model.modules() if "Dropout" in type(module).__name__
    )
    if dropout and not args.disable_dropout:
        found.append("dropout: the policy's dropout is on, and its noise counts as KL: disable_dropout=True")
    return found


def _version() -> str | None:
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return None
