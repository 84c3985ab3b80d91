from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models.actor_critic import WAYS_AGREE, choose_way, read_states
from rlhf_kl.models.last_layer import ALONE, last_mlp, last_mlp_at, try_last_mlp
from rlhf_kl.models.recompute import enable_recompute

pytestmark = pytest.mark.usefixtures("uncompiled")  # this is about what models do themselves

Make = Callable[..., Any]
IDS = torch.tensor([[1, 3, 4, 5, 6], [1, 4, 0, 0, 0]])
STATES = torch.tensor([2, 3, 5])


def rows_read(model: Any) -> list[int]:
    """How many positions the last MLP works at in each pass from here on."""
    seen: list[int] = []
    mlp = last_mlp(model)
    assert mlp is not None
    mlp.c_proj.register_forward_hook(lambda _module, _args, output: seen.append(output.shape[:-1].numel()))
    return seen


def gradients(model: Any) -> torch.Tensor:
    model.zero_grad()
    read_states(model, IDS, torch.ones_like(IDS), STATES)[0].square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_it_works_at_the_states_only_and_gives_the_same_gradients(new_model: Make) -> None:
    model = new_model()
    whole = gradients(model)
    choose_way(model)
    seen = rows_read(model)
    torch.testing.assert_close(gradients(model), whole, rtol=1e-4, atol=1e-5)
    assert seen == [3]


def test_layers_that_are_computed_again_are_left_whole(new_model: Make) -> None:
    model = new_model()
    choose_way(model)
    enable_recompute(model, "x")
    seen = rows_read(model)
    gradients(model)
    assert seen == [10]


class _Scaled(nn.Module):
    """Looks at all positions at once, as no MLP should."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * x.abs().amax()


def test_an_mlp_that_does_not_agree_is_left_whole(new_model: Make) -> None:
    model = new_model()
    layer = model.transformer.h[-1]
    layer.mlp = _Scaled(layer.mlp)
    choose_way(model)
    assert not getattr(layer.mlp, ALONE)


class _Pair(nn.Module):
    """Gives more than one tensor, of which the layer takes the first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return _First((self.inner(x), x))


class _First(tuple[torch.Tensor, ...]):
    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        return other + self[0]


def test_one_that_gives_something_else_is_left_whole(new_model: Make) -> None:
    model = new_model()
    layer = model.transformer.h[-1]
    layer.mlp = _Pair(layer.mlp)

    def read() -> torch.Tensor:
        with torch.no_grad(), last_mlp_at(model, STATES):
            hidden = torch.ones(2, 5, model.config.n_embd)
            return hidden + layer.mlp(hidden)

    try_last_mlp(model, read, WAYS_AGREE)
    assert not getattr(layer.mlp, ALONE)
    assert torch.equal(read(), read())
