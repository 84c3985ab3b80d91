"""Logits and log-probabilities with their gradients by the compiled functions: the same numbers as torch's."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kl.kernels.build import library

SIZE, ADDRESS, FLOAT, COUNT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int


def address(x: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; the caller keeps it alive."""
    return ADDRESS(x.data_ptr())


def threads() -> ctypes.c_int:
    """As many as torch uses."""
    return COUNT(torch.get_num_threads())


def plain_matrix(x: Tensor) -> bool:
    """Whether compiled functions can read it: float32 rows on the CPU, one after the other."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.dim() == 2 and x.is_contiguous()


def compiled() -> Any:
    """The library, where the caller has seen that there is one."""
    found = library()
    assert found is not None
    return found


def check(failed: int) -> None:
    """Errors: torch.OutOfMemoryError where a compiled function had no memory to work in."""
    if failed:
        raise torch.OutOfMemoryError("a compiled function could not get its working memory")


class HeadLogits(torch.autograd.Function):
    """Logits (N, V) of hidden states (N, H) by a head (V, H)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        logits = hidden.new_empty(len(hidden), len(weight))
        check(
            compiled().head_forward(
                SIZE(len(hidden)),
                SIZE(hidden.shape[1]),
                SIZE(len(weight)),
                address(hidden),
                address(weight),
                address(logits),
                threads(),
            )
        )
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        grad = grad.contiguous()
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        check(
            compiled().head_backward(
                SIZE(len(hidden)),
                SIZE(hidden.shape[1]),
                SIZE(len(weight)),
                address(hidden),
                address(weight),
                address(grad),
                address(d_hidden),
                address(d_weight),
                threads(),
            )
        )
        return d_hidden, d_weight


class ChosenLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[id] (N,) for logits (N, V) and ids (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        ids = ids.contiguous()
        logprobs, norms = logits.new_empty(len(logits)), logits.new_empty(len(logits), 2)
        ctx.save_for_backward(logits, ids, norms)
        ctx.scale = FLOAT(1.0 / temperature)
        compiled().chosen_forward(
            SIZE(len(logits)),
            SIZE(logits.shape[1]),
            address(logits),
            address(ids),
            ctx.scale,
            address(logprobs),
            address(norms),
            threads(),
        )
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, norms = ctx.saved_tensors
        d_logits, grad = torch.empty_like(logits), grad.contiguous()
        compiled().chosen_backward(
            SIZE(len(logits)),
            SIZE(logits.shape[1]),
            address(logits),
            address(ids),
            ctx.scale,
            address(norms),
            address(grad),
            address(d_logits),
            threads(),
        )
        return d_logits, None, None
