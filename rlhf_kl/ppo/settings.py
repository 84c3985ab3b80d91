"""What PPO is told: numbers and names alone, so that it knows nothing of config files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_kl.types import Unit


@dataclass(frozen=True)
class PPOSettings:
    """The settings of a run that an update reads; those with the name of a key are told in the config's reference."""

    seed: int
    updates: int  # of the whole run
    dtype: str  # of the policy's layers
    recomputes: bool  # whether the layers compute their activations again in the backward pass
    # the rollout
    batch_size: int  # responses of all processes
    group: int  # responses to each prompt, neighbours in the batch
    temperature: float
    engine: bool  # whether another program draws the responses
    # the KL
    unit: Unit
    target: float  # nats per unit
    ceiling: float | None  # nats per unit
    backtracks: bool  # whether an update is shortened that would cross the ceiling
    estimator: str
    placement: str
    # advantages
    advantage: str
    scale_by_group_std: bool
    critic: Literal["features", "head", "separate"] | None
    gamma: float
    lam: float
    critic_lam: float
    whiten_rewards: bool
    # losses
    cliprange: float
    cliprange_value: float
    vf_coef: float
    # steps of the optimizer
    epochs: int
    minibatch_size: int
    microbatch_size: int | None
    rows_together: int  # neighbours of the batch that are in one minibatch
    lr_schedule: str
    value_warmup: int
    critic_epochs: int
    max_grad_norm: float
    max_update_kl: float | None
