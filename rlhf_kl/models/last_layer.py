"""The last layer's MLP at the positions that are read, and nowhere else.

After the last attention no position looks at another, so what the last MLP says of a position that nobody reads
changes nothing: for prompts, and for all of a text but its last token where a reward model reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ALONE = "rlhf_kl_alone"  # attribute of an MLP: it was tried at some positions only, and agreed


def last_mlp(model: Any) -> nn.Module | None:
    """The MLP of the last layer; None where the model has no list of layers with one each."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            found = getattr(module[-1], "mlp", None)
            return found if isinstance(found, nn.Module) else None
    return None


@contextlib.contextmanager
def last_mlp_at(model: Any, positions: Tensor) -> Iterator[None]:
    """A forward pass whose last MLP works at `positions` (N,), counted through the B * L of its input; zeros elsewhere.

    Does nothing with a model for which `try_last_mlp` has not shown that it makes no difference, nor with one whose
    layers are computed again in the backward pass, when this is over.
    """
    mlp = last_mlp(model)
    if (
        mlp is None
        or not getattr(mlp, ALONE, False)
        or (getattr(model, "recomputes", False) and torch.is_grad_enabled())
    ):
        yield
        return
    shapes: list[torch.Size] = []

    def pick(_mlp: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shapes.append(args[0].shape)
        return (args[0].flatten(0, 1).index_select(0, positions).unsqueeze(0), *args[1:])

    def place(_mlp: nn.Module, _args: Any, output: Tensor) -> Tensor:
        shape = shapes.pop()
        whole = output.new_zeros(shape[0] * shape[1], output.shape[-1])
        return whole.index_copy(0, positions, output.flatten(0, 1)).view(*shape[:2], -1)

    with mlp.register_forward_pre_hook(pick), mlp.register_forward_hook(place):
        yield


@torch.no_grad()
def try_last_mlp(model: Any, read: Callable[[], Tensor], tolerance: float) -> None:
    """Mark the last MLP where `read()`, which passes through `last_mlp_at`, says the same with and without it.

    `tolerance`: largest difference over the largest number.
    """
    mlp = last_mlp(model)
    if mlp is None:
        return
    setattr(mlp, ALONE, False)
    whole = read()
    setattr(mlp, ALONE, True)
    try:
        gap = float((read() - whole).abs().max())
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        gap = float("inf")  # it takes or gives something else than one tensor
    setattr(mlp, ALONE, gap <= tolerance * max(1.0, float(whole.abs().max())))
