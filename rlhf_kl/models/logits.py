"""From hidden states to logits: the precision of an LM head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_kl.hub import first_line
from rlhf_kl.sharding import may_shard
from rlhf_kl.ui import log

LARGE = 1 << 23  # numbers of a weight (32 MiB): of smaller ones nobody notices a copy
SOFT_CAP = "final_logit_softcapping"
SAME_PRODUCT = 1e-3  # largest error of a product over its largest number: one that rounds its sums has more

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


@cache
def rounding_product(device: torch.device) -> Callable[[Tensor, Tensor], Tensor] | None:
    """x (n, H), weight (V, H) -> x @ weight.T with operands rounded to bfloat16 and sums in float32: (n, V) float32.

    None where the device has no fast one, or one that is off.
    """
    if device.type == "cpu":
        tests = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
        has_units = any(test is not None and test() for test in tests)
        return _product_of_cpu if hasattr(torch.backends.mkldnn, "matmul") and has_units else None
    if device.type != "cuda":
        return None
    if fault := fault_of(_product_of_cuda, device):
        log.info(f"the head computes in float32: {device} has no product of bfloat16 with sums in float32: {fault}")
    return None if fault else _product_of_cuda


def fault_of(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> str:
    """Why a `rounding_product` of this device is not used; empty if it agrees with float32."""
    x, weight = (torch.linspace(-1.0, end, 64 * 64, device=device).view(64, 64) for end in (1.0, 3.0))
    exact = x.bfloat16().float() @ weight.bfloat16().float().T
    try:
        off = float((product(x, weight) - exact).abs().max() / exact.abs().max())
    except (TypeError, RuntimeError) as error:
        return first_line(error)
    return "" if off <= SAME_PRODUCT else f"it is off by {off:.2g}"


def _product_of_cpu(x: Tensor, weight: Tensor) -> Tensor:
    with _rounding(), torch.autocast("cpu", enabled=False):
        return torch.mm(x, weight.T)


def _product_of_cuda(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return torch.mm(x.bfloat16(), weight.bfloat16().T, out_dtype=torch.float32)


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
    """Logits by a `rounding_product`, with gradients."""

    def __init__(self, layer: nn.Linear, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.layer, self.product = layer, product
        self.frozen: tuple[Tensor, tuple[int, int]] | None = None  # the centred weight, while it is not trained

    def now(self) -> Project:
        """For the weights as they are; the mean state is that of the first call."""
        weight, mean, shift = self.layer.weight, None, None
        at = weight.data_ptr(), weight._version  # `scale` moves frozen weights; a fused optimizer tells no version
        centred = self.frozen[0] if self.frozen and self.frozen[1] == at and not weight.requires_grad else None
        if centred is None:
            centred = weight.detach() - weight.detach().mean(0)
            if weight.device.type != "cpu":  # where a copy in float32 would only take memory
                centred = centred.bfloat16()
        self.frozen = None if weight.requires_grad else (centred, at)

        def head(hidden: Tensor) -> Tensor:
            nonlocal mean, shift
            hidden = hidden.float()
            if mean is None:
                with torch.autocast(hidden.device.type, enabled=False):
                    mean = hidden.detach().mean(0)
                    shift = weight.detach().float() @ mean
                    shift -= shift.mean()
            logits: Tensor = _RoundedProduct.apply(self.product, hidden, weight, centred, mean, shift)
            return logits

        return head


class _RoundedProduct(torch.autograd.Function):
    """`hidden @ centred.T`; a loss that no shift of the logits changes has the same gradient in both weights."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Callable[[Tensor, Tensor], Tensor],
        hidden: Tensor,
        weight: Tensor,
        centred: Tensor,
        mean: Tensor,
        shift: Tensor,
    ) -> Tensor:
        """`shift`: what the mean state gives."""
        del weight
        ctx.save_for_backward(hidden, centred)
        return product(hidden - mean, centred).add_(shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None, None]:
        hidden, centred = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            rounded = grad.bfloat16()  # gradients in bfloat16, as those of the layers
            to_hidden = (rounded @ centred.bfloat16()).float() if ctx.needs_input_grad[1] else None
            to_weight = (rounded.T @ hidden.bfloat16()).float() if ctx.needs_input_grad[2] else None
        return None, to_hidden, to_weight, None, None, None


@contextlib.contextmanager
def _rounding() -> Iterator[None]:
    """Inside, products of float32 matrices on a CPU round their operands to bfloat16."""
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


# ---- heads that are the embeddings, in float32 and float16 runs


def is_tied(model: Any) -> bool:
    """Whether the head of a plain model is its embeddings."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = isinstance(words, nn.Embedding) and type(head) is nn.Linear and head.bias is None
    return plain and head.weight is words.weight and not may_shard(model)


def learns_few(weight: Tensor, tokens: int) -> bool:
    """Whether a pass is trained that has fewer tokens than there are words, with a large weight (V, H) on a CPU.

    On a GPU the sum of a word's rows has no order, so it would not be the same twice.
    """
    trained = weight.requires_grad and torch.is_grad_enabled() and weight.device.type == "cpu"
    return trained and weight.numel() >= LARGE and tokens < len(weight)


@contextlib.contextmanager
def rows_of_words(model: Any, ids: Tensor) -> Iterator[None]:
    """A forward pass of `ids` whose gradient of tied embeddings has the rows of these words, not those of all words.

    That of the head has all, and takes them in: a second one of this size would be the peak of memory.
    """
    words = model.get_input_embeddings()
    if not (is_tied(model) and learns_few(words.weight, ids.numel())):
        yield
        return
    words.sparse = True
    try:
        yield
    finally:
        words.sparse = False


class TiedHead:
    """Logits (n, V) float32 whose gradient of the weight (V, H), that of the embeddings too, is one tensor for a run.

    It is written to `weight.grad` in the backward pass. A tensor of the size of a large vocabulary that each pass
    makes and frees is what breaks up a CPU's memory, and a copy of it is the peak.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.gradient: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Of hidden states (n, H) float32."""
        logits: Tensor = _AddsGradient.apply(hidden, self.layer.weight, self)
        return logits

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add the gradient from that of the logits (n, V); other parts of the backward pass add to it too."""
        weight = self.layer.weight
        if weight.grad is not None:
            weight.grad.addmm_(grad.T, hidden)
            return
        if self.gradient is None:
            self.gradient = torch.empty_like(weight, requires_grad=False)
        weight.grad = torch.mm(grad.T, hidden, out=self.gradient)


class _AddsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: TiedHead) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.head = head
        logits: Tensor = head.layer(hidden)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.head.add(grad, hidden)
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None
