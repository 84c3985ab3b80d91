"""What cannot be sharded is refused, rather than trained whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.commands.build import shard_models
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.rewards.scorer import Scorers


def shard(policy: Any, reference: Any) -> None:
    config = TrainConfig.model_validate({"policy": {"model": "builtin:reviews"}, "reference": {"shard": True}})
    lm = SimpleNamespace(model=policy, device=torch.device("cpu"))
    parts: Any = SimpleNamespace(policy=lm, reference=SimpleNamespace(model=reference), scorers=Scorers(), sharded=[])
    shard_models(config, parts, None)  # type: ignore[arg-type]


def test_an_adapters_reference_is_the_policy() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"no frozen model is separate from the policy: set policy\.shard"):
        shard(model, model)


def test_a_model_that_does_not_name_its_layers() -> None:
    with pytest.raises(InputError, match="a Sequential does not name its layers"):
        shard(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
