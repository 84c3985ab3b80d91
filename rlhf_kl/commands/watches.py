"""Builds the checks of a run's rows from its config and from figures of the reference."""

from __future__ import annotations

from rlhf_kl.commands.build import Parts
from rlhf_kl.commands.training import Training
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.run.alerts import KLAlerts
from rlhf_kl.run.kl_bought import KLBought


def kl_alerts(config: TrainConfig, training: Training) -> KLAlerts:
    """The alerts that watch this run's rows."""
    control = training.trainer.controller
    return KLAlerts(
        None if training.coef == 0 else config.kl.target_value,
        unit=config.kl.unit,
        kind=config.kl.controller.kind,
        total_updates=config.updates,
        min_coef=control.min_coef if control.adjusts else None,
        max_coef=control.max_coef if control.adjusts else None,
        ceiling=config.kl.ceiling is not None,
    )


def kl_bought(config: TrainConfig, parts: Parts, training: Training) -> KLBought:
    """The check that this run's KL brings score."""
    scores = training.reference_scores
    return KLBought(
        config,
        curve=scores.tilt_curve(),
        mean=scores.mean,
        mean_stderr=scores.mean_stderr,
        spread=scores.spread,
        learning_rate=training.trainer.rate.peak,
        target=None if training.coef == 0 else config.kl.target_value,
        warns=parts.reference_is_initial_policy,
    )
