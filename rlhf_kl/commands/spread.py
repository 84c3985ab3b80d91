"""Shards the models of a run over its processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_kl.commands.parts import Parts
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.models.value import ActorCritic, SeparateValue
from rlhf_kl.ops.packing import pack_last
from rlhf_kl.sharding import is_sharded, shard, unsharded


def spread_models(config: TrainConfig, parts: Parts, model: ActorCritic) -> None:
    """Shard models by `policy.shard` and `reference.shard`, before an optimizer is made; `parts.spread` lists them.

    A value head and a critic on features are small and stay whole.
    """
    policy, device = parts.policy, parts.policy.device
    if config.policy.shard:
        one = pack_last([[0]], device)
        shard(layers_of(policy.base), policy, device)
        if isinstance(model.value, SeparateValue):
            shard(layers_of(model.value.trunk.base), model.value, device)
        parts.spread += [policy, *([model.value] if isinstance(model.value, SeparateValue) else [])]
        with torch.no_grad():  # the first pass makes all layers part of this root
            hidden = policy.states(one, lambda _, hidden: hidden)
            if model.value is not None:
                model.value(one, hidden)
        with unsharded(*parts.spread):
            pass
        if held := [name for name, p in policy.named_parameters() if p.requires_grad and not is_sharded(p)]:
            raise RuntimeError(f"policy.shard: these tensors are not sharded: {held[:3]}")
    if config.reference.shard:
        frozen = [parts.reference.model, *(reward.model for reward in parts.scorers.models.values())]
        apart = [each for each in frozen if each is not policy.model]  # an adapter's reference is the policy
        if not apart and not config.policy.shard:
            raise InputError("reference.shard: no frozen model is separate from the policy: set policy.shard")
        for each in apart:
            if not (layers := layers_of(each)):
                raise InputError(f"reference.shard: a {type(each).__name__} does not name its layers: set it to false")
            shard(layers, None, device)
            parts.spread.append(each)


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a transformers model, by the class names that the model lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
