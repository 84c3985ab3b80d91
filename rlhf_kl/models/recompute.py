"""Gradient checkpointing: layers keep no activations and recompute them in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_kl.errors import InputError
from rlhf_kl.hub import first_line


def enable_recompute(model: Any, what: str) -> None:
    """Switch it on. Errors: InputError if the architecture does not support it."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    # transformers 5.2x renamed it and warns about the old name.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"{what}: {first_line(error)}") from error


@contextlib.contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """A forward pass whose layers are recomputed later, if that was switched on and gradients are enabled.

    Layers recompute only in training mode, in which they reject the cache that sampling needs. So their mode is
    changed for this pass only. Their submodules keep their mode: the router of a mixture of experts, for example,
    draws noise in training mode.
    """
    layers = []
    if torch.is_grad_enabled():
        layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
