"""From hidden states to logits: the precision of an LM head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SOFT_CAP = "final_logit_softcapping"

Project = Callable[[Tensor], Tensor]  # hidden states (n, H) -> float32 logits (n, V)


def final_logits(logits: Tensor, config: Any) -> Tensor:
    """Operations on the logits after the LM head: a scale (Cohere, Granite, Falcon-H1), a soft cap (Gemma 2)."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if scale := getattr(config, name, None):
            logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if cap := getattr(config, SOFT_CAP, None):
        logits = cap * torch.tanh(logits / cap)
    return logits


# ---- heads of bfloat16 runs
#
# Real heads shift all logits by tens of nats, through a hidden unit near 10 whose column is near -7: rounding these two
# to bfloat16 costs 0.3 nats. A row of logits can be shifted, since no probability changes. So the head's mean over the
# vocabulary is left out, and what the mean state gives is added in float32: only small numbers are rounded.


def can_shift(layer: nn.Module, config: Any) -> bool:
    """Whether the logits are a plain linear map that may be shifted: no adapter, no bias, no soft cap."""
    return type(layer) is nn.Linear and layer.bias is None and not getattr(config, SOFT_CAP, None)


def has_rounding_products(device: torch.device) -> bool:
    """Whether float32 products that round to bfloat16 are fast: on a CPU with units for bfloat16, from torch 2.9 on."""
    tests = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    has_units = any(test is not None and test() for test in tests)
    return device.type == "cpu" and hasattr(torch.backends.mkldnn, "matmul") and has_units


def decoding_head(layer: nn.Linear) -> Project:
    """Logits by products in bfloat16, their results included, for steps that are only sampled from.

    The weights are those of now, and the mean state is that of the first call. Errors of about 0.01 nats.
    """
    mean_weight = layer.weight.mean(0)
    centred = (layer.weight - mean_weight).bfloat16()
    mean = shift = None

    def head(hidden: Tensor) -> Tensor:
        nonlocal mean, shift
        hidden = hidden.float()
        with torch.autocast(hidden.device.type, enabled=False):
            if mean is None:
                mean = hidden.mean(0)
                shift = layer.weight @ mean - mean_weight @ mean
            return shift + (hidden - mean).bfloat16() @ centred.T

    return head


class RoundedHead:
    """Logits by products that round to bfloat16 and sum in float32, with gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.frozen: Tensor | None = None  # the centred weight, while it is not trained

    def now(self) -> Project:
        """For the weights as they are; the mean state is that of the first call."""
        weight, mean, shift = self.layer.weight, None, None
        centred = None if weight.requires_grad else self.frozen
        if centred is None:
            centred = weight.detach() - weight.detach().mean(0)
        self.frozen = None if weight.requires_grad else centred

        def head(hidden: Tensor) -> Tensor:
            nonlocal mean, shift
            hidden = hidden.float()
            if mean is None:
                with torch.autocast(hidden.device.type, enabled=False):
                    mean = hidden.detach().mean(0)
                    shift = centred @ mean
            logits: Tensor = _RoundedProduct.apply(hidden, weight, centred, mean, shift)
            return logits

        return head


class _RoundedProduct(torch.autograd.Function):
    """`hidden @ centred.T`; a loss that no shift of the logits changes has the same gradient in both weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, centred: Tensor, mean: Tensor, shift: Tensor) -> Tensor:
        """`shift`: `centred @ mean`."""
        del weight
        ctx.save_for_backward(hidden, centred)
        with _rounding(), torch.autocast(hidden.device.type, enabled=False):
            return torch.mm(hidden - mean, centred.T).add_(shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, centred = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            rounded = grad.bfloat16()  # gradients in bfloat16, as those of the layers
            to_hidden = (rounded @ centred.bfloat16()).float() if ctx.needs_input_grad[0] else None
            to_weight = (rounded.T @ hidden.bfloat16()).float() if ctx.needs_input_grad[1] else None
        return to_hidden, to_weight, None, None, None


@contextlib.contextmanager
def _rounding() -> Iterator[None]:
    """Inside, products of float32 matrices on a CPU round their operands to bfloat16."""
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
