"""Shards the models of a run, before anything is computed with them."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import Trunk
from rlhf_kl.ops.packing import idle_pass
from rlhf_kl.sharding import layers_of, shard_frozen, shard_trained
from rlhf_kl.training.setup import Setup, frozen_models


def shard_models(config: TrainConfig, setup: Setup, device: torch.device) -> None:
    """Shard what the config says, layer by layer from the disk. All processes call together.

    The embeddings and the head of a frozen model stay whole: each pass in training needs the reference's.
    """
    policy, frozen = setup.policy, frozen_models(setup)
    if config.policy.shard:
        if not Path(config.run.output_dir).is_dir():
            raise InputError(
                f"policy.shard: all machines write to {config.run.output_dir}, which this one does not see"
            )
        shard_trained(policy, policy.base, device, policy.dtype, idle_pass(device))
        if setup.reference.model is policy.model:  # with its adapter at the start
            setup.reference.within = [policy]
    elif config.reference.shard and not frozen:
        raise InputError("reference.shard: no frozen model is separate from the policy: set policy.shard")
    for each in frozen if config.reference.shard else ():
        if not layers_of(each):
            raise InputError(f"reference.shard: a {type(each).__name__} does not name its layers: set it to false")
        shard_frozen(Trunk(each, policy.dtype), device, idle_pass(device))
