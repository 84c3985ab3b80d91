"""Shards the models of a run, before anything is computed with them."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.sharding import bring, layers_of, shard, shard_trained
from rlhf_kl.training.setup import Setup, frozen_models


def shard_models(config: TrainConfig, setup: Setup, device: torch.device) -> None:
    """Shard what the config says, layer by layer from the disk; `setup.sharded` lists it. All processes call together.

    The embeddings and the head of a frozen model stay whole: each pass in training needs the reference's.
    """
    policy, frozen = setup.policy, frozen_models(setup)
    watched = [reward.model for reward in setup.scorers.watched.models.values()]
    if config.policy.shard:
        if not Path(config.run.output_dir).is_dir():
            raise InputError(
                f"policy.shard: all machines write to {config.run.output_dir}, which this one does not see"
            )
        shard_trained(policy, policy.base, device, policy.dtype)
        setup.sharded.append(policy)
    elif config.reference.shard and not frozen:
        raise InputError("reference.shard: no frozen model is separate from the policy: set policy.shard")
    for each in frozen if config.reference.shard else ():
        if not (layers := layers_of(each)):
            raise InputError(f"reference.shard: a {type(each).__name__} does not name its layers: set it to false")
        shard(layers, device, policy.dtype, policy.dtype)
        bring(each, device, torch.float32)
        if each not in watched:  # which rollouts do not need
            setup.sharded.append(each)
