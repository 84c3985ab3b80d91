"""Value functions: a head on the policy's hidden states, a separate trunk, or a critic on features of frozen models.

Source: Ziegler et al. 2019 (shared trunk); Ouyang et al. 2022 (separate, from the reward model).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_kl.models.lm import LM, Trunk
from rlhf_kl.ops.packing import Packed
from rlhf_kl.seeding import generator
from rlhf_kl.sharding import local

WIDTH = 128  # of a FeatureCritic


class FeatureCritic(nn.Module):
    """A small network that predicts the final score from frozen features of a state.

    The features never change, so they are computed once per rollout, and fitting costs little compared with an epoch
    of the policy. The policy gets no gradient from the value. Initially it predicts `mean`, the mean score of the
    reference, everywhere; it learns in units of `scale`.
    """

    def __init__(self, size: int, mean: float, scale: float, seed: int) -> None:
        """`size`: features of a state. `mean` and `scale`: of the reference's shaped scores."""
        super().__init__()
        self.size, self.mean, self.scale = size, mean, scale
        self.inner, self.outer = nn.Linear(size, WIDTH), nn.Linear(WIDTH, 1)
        noise = generator(seed, "critic")  # the global generator is not used
        with torch.no_grad():
            self.inner.weight.normal_(0.0, size**-0.5, generator=noise)
            for zero in (self.inner.bias, self.outer.weight, self.outer.bias):
                zero.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """Features (N, F) -> values (N,) float32."""
        values: Tensor = self.outer(nn.functional.gelu(self.inner(features))).squeeze(-1)
        return self.mean + self.scale * values

    def loss(self, features: Tensor, returns: Tensor) -> Tensor:
        """Squared errors (N,) in units of the scale, for features (N, F) and returns (N,)."""
        errors: Tensor = (self(features) - returns) / self.scale
        return errors.square()


class HeadValue(nn.Module):
    """A linear head on the policy's hidden states; 0 everywhere at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = zero_head(hidden_size)

    def forward(self, rows: Packed, hidden: Tensor) -> Tensor:
        """Values (N,) float32 at the states of `rows`, whose hidden states in the policy are `hidden` (N, H)."""
        del rows
        return _linear(self.head, hidden)


class SeparateValue(nn.Module):
    """A separate model with a linear head."""

    def __init__(self, trunk: Trunk, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, rows: Packed, hidden: Tensor | None = None) -> Tensor:
        """Values (N,) float32 at the states of `rows`; the policy's hidden states are not used."""
        del hidden
        return _linear(self.head, self.trunk.hidden(rows))


def _linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.float())
    return values.squeeze(-1)


@dataclass(frozen=True)
class ActorCritic:
    """A policy and its value function: one that learns in the policy's loss, or a critic on frozen features."""

    policy: LM
    value: HeadValue | SeparateValue | None = None
    critic: FeatureCritic | None = None

    @property
    def modules(self) -> nn.ModuleDict:
        """The optimised modules, which a checkpoint holds, by name."""
        parts = {"policy": self.policy.module, "value": self.value, "critic": self.critic}
        return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that learn in the policy's loss."""
        modules: list[nn.Module] = [self.policy.module, *([self.value] if self.value is not None else [])]
        return [p for module in modules for p in module.parameters() if p.requires_grad]


def zero_head(size: int) -> nn.Linear:
    """A linear map (H,) -> (1,) that is 0 everywhere."""
    head = nn.Linear(size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def value_head_from_reward(score: nn.Linear, mean: float, std: float) -> nn.Linear:
    """The reward model's head as a value head that predicts *normalised* scores: (w h - mean) / std."""
    head = nn.Linear(score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(score.weight / std)
        head.bias.copy_(((score.bias if score.bias is not None else 0.0) - mean) / std * torch.ones(1))
    return head


def freeze(model: nn.Module) -> nn.Module:
    """Disable gradients, set eval mode; returns the model."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def frozen_lm(model: nn.Module, dtype: torch.dtype, device: torch.device) -> LM:
    """A language model that is only read."""
    return LM(freeze(model).to(device), dtype)


def store_frozen(model: Any, dtype: torch.dtype) -> None:
    """Store the weights of frozen layers in the dtype that they compute in: the same bits, and no cast in each pass.

    Embeddings, norms, heads and what is trained stay float32.
    """
    whole = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in whole.base_model.modules():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, nn.Linear | Conv1D) and not any(p.requires_grad for p in own):
            for parameter in own:
                parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def freezing(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, these trainable parameters get no gradients."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def shared_trainable(trained: nn.Module, reference: nn.Module) -> list[str]:
    """Names of trainable tensors whose memory the reference uses as well."""
    frozen = {local(parameter).data_ptr() for parameter in reference.parameters()}
    return [name for name, p in trained.named_parameters() if p.requires_grad and local(p).data_ptr() in frozen]
