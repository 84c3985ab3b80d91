"""Policy and value function as one module, so that one wrapper (DDP, autocast) holds both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ResponseOutput(NamedTuple):
    """Policy logits and values at the response positions."""

    logits: Tensor  # (B, T, V): the distribution that token t was drawn from
    values: Tensor  # (B, T) float32: of the state before token t


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, L) that count real tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def response_logits(model: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """Logits (B, width, V) from which the last `width` tokens of `ids` (B, L) were drawn.

    Runs the model's own forward, so soft-capping and scaling of the logits stay in.
    """
    logits: Tensor = _forward(model, ids, mask, width, hidden=False).logits
    return logits[:, :-1]


def _forward(model: Any, ids: Tensor, mask: Tensor, width: int, *, hidden: bool) -> Any:
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids(mask),
        logits_to_keep=width + 1,
        output_hidden_states=hidden,
        use_cache=False,
    )


class ActorCritic(nn.Module):
    """A causal LM with a value function: a head on its own trunk, or a trunk of its own.

    Source: Ziegler et al. 2019 (shared trunk); Ouyang et al. 2022 (separate, from the reward model).
    """

    def __init__(self, policy: Any, value_trunk: Any | None = None, value_head: nn.Linear | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.value_trunk = value_trunk
        size = (value_trunk or policy).config.get_text_config().hidden_size
        self.value_head = value_head if value_head is not None else _zero_head(size)

    def forward(self, ids: Tensor, mask: Tensor, width: int) -> ResponseOutput:
        """`ids` (B, P + width) and `mask` (B, P + width) -> logits (B, width, V), values (B, width)."""
        if self.value_trunk is None:
            output = _forward(self.policy, ids, mask, width, hidden=True)
            hidden = output.hidden_states[-1]
        else:
            output = _forward(self.policy, ids, mask, width, hidden=False)
            hidden = self.value_trunk(
                input_ids=ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False
            ).last_hidden_state
        states = hidden[:, -(width + 1) : -1]
        values = self.value_head(states.to(self.value_head.weight.dtype)).squeeze(-1)
        return ResponseOutput(output.logits[:, :-1], values.float())


def _zero_head(size: int) -> nn.Linear:
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
    """No gradients, eval mode; returns the model."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def shared_trainable(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names of trainable tensors of `model` whose memory the reference uses as well."""
    frozen = {parameter.data_ptr() for parameter in reference.parameters()}
    return [name for name, p in model.named_parameters() if p.requires_grad and p.data_ptr() in frozen]
