"""Logits and log-probabilities with their gradients by the compiled functions."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kl.kernels.build import library

SIZE, ADDRESS, FLOAT, COUNT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are


def address(x: Tensor) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; the caller keeps it alive."""
    return ADDRESS(x.data_ptr())


def threads() -> ctypes.c_int:
    """As many as torch uses."""
    return COUNT(torch.get_num_threads())


def plain(x: Tensor) -> bool:
    """Whether compiled functions can read it: float32 on the CPU, row after row."""
    return x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


def plain_matrix(x: Tensor) -> bool:
    """Whether it is one that they can read."""
    return x.dim() == 2 and plain(x)


def compiled() -> Any:
    """The library, where the caller has seen that there is one."""
    found = library()
    assert found is not None
    return found


def check(failed: int) -> None:
    """Errors: torch.OutOfMemoryError where a compiled function had no memory to work in."""
    if failed:
        raise torch.OutOfMemoryError("a compiled function could not get its working memory")


def head_logits(hidden: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
    """Logits (N, V) of hidden states (N, H) by a head (V, H), without gradients; in the first rows of `into`."""
    logits = hidden.new_empty(len(hidden), len(weight)) if into is None else into[: len(hidden)]
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


class HeadLogits(torch.autograd.Function):
    """Logits (N, V) of hidden states (N, H) by a head (V, H)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return head_logits(hidden, weight)

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
    """log softmax(logits / temperature)[id] (N,) for logits (N, V) and ids (N,).

    Errors: IndexError for an id that is not in the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        ids = ids.long().contiguous()
        if ids.shape != logits.shape[:1]:
            raise IndexError(f"{tuple(ids.shape)} ids for {tuple(logits.shape)} logits")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= logits.shape[1]):
            raise IndexError(f"an id beyond the vocabulary of {logits.shape[1]}")
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


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling: ids (B,) from logits (B, V) and one number in [0, 1) per row (B,)."""
    ids, uniform = torch.empty(len(logits), dtype=torch.long, device="cpu"), uniform.double().contiguous()
    check(
        compiled().pick_forward(
            SIZE(len(logits)),
            SIZE(logits.shape[1]),
            address(logits),
            address(uniform),
            FLOAT(1.0 / temperature),
            address(ids),
            threads(),
        )
    )
    return ids
