"""Gradients between a backward pass and a step: their sum over the processes, and the scale that float16 needs.

Buckets of them travel while the backward pass goes on. Sources: Li et al. 2020, "PyTorch Distributed" (2006.15704),
section 3.2; Micikevicius et al. 2018, "Mixed Precision Training" (1710.03740), section 3.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_kl.sharding import is_sharded, local

BUCKET = 1 << 23  # numbers of the gradients that travel together: one message costs more than many numbers
# Of a loss in float16: its start, its bounds, and the steps without an overflow after which it grows. In the built-in
# world a quarter of the gradients in the layers would be 0 without it, 0.2 % are with its start; the largest is 1,300.
# A run has few steps, 240 there: torch's 2,000 would keep a low one for all of it. A growth costs one step at most.
SCALE, LEAST_SCALE, MOST_SCALE, GROWS_AFTER = 2.0**16, 1.0, 2.0**24, 200


class GradientSum:
    """The sum before one step.

    All processes send the same buckets in the same order, that in which gradients come: of the last layers first.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Of these `parameters`, the same on all processes, those that learn and are not sharded."""
        self._buckets = buckets((p for p in parameters if p.requires_grad and not is_sharded(p)), BUCKET)[::-1]
        self._awaited = [set(bucket) for bucket in self._buckets]
        self._sent: list[tuple[Tensor, Any]] = []
        self._present: list[bool] = []  # which gradients this process has: an expert that no token used has none

    @contextlib.contextmanager
    def early(self) -> Iterator[None]:
        """Around the last backward pass: a bucket is sent once its gradients, and all buckets before it, are there."""
        pairs = [(p, awaited) for bucket, awaited in zip(self._buckets, self._awaited, strict=True) for p in bucket]
        hooks = [p.register_post_accumulate_grad_hook(partial(self._arrived, awaited)) for p, awaited in pairs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, add: Callable[[Tensor], Tensor]) -> None:
        """Send the rest, and give every parameter its sum; without a gradient on any process it keeps none.

        `add`: sums a small tensor over the processes.
        """
        if not self._buckets:
            return
        while len(self._sent) < len(self._buckets):
            self._send()
        present = iter(add(torch.tensor(self._present, dtype=torch.float32)).tolist())
        for bucket, (joined, transfer) in zip(self._buckets, self._sent, strict=True):
            transfer.wait()
            for parameter, gradient in zip(bucket, joined.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = gradient.view_as(parameter) if next(present) else None

    def _arrived(self, awaited: set[nn.Parameter], parameter: nn.Parameter) -> None:
        awaited.discard(parameter)
        while len(self._sent) < len(self._buckets) and not self._awaited[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        """Send the next bucket; a gradient that is not there is zero."""
        bucket = self._buckets[len(self._sent)]
        self._present += [p.grad is not None for p in bucket]
        joined = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        for parameter in bucket:
            parameter.grad = None  # its memory is that of the next bucket
        self._sent.append((joined, dist.all_reduce(joined, async_op=True)))


class LossScale:
    """A factor of the loss, by the rule of `torch.amp.GradScaler`: layers in float16 would round small gradients to 0.

    A step whose gradients overflow is left out, and halves it. The joint norm over all processes says so, so it is the
    same on all of them, with weights in shards too. Nothing waits for the device before `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor, self.steps, self.left_out = torch.tensor([SCALE, 0.0, 0.0], device=device)

    def __call__(self, loss: Tensor) -> Tensor:
        """What is differentiated in place of the loss."""
        scaled: Tensor = loss * self.factor
        return scaled

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters the gradients of the loss itself."""
        if gradients := [local(p.grad) for p in parameters if p.grad is not None]:
            torch._foreach_mul_(gradients, self.factor.reciprocal())

    def observe(self, finite: Tensor) -> None:
        """After each step: whether its gradients were finite."""
        finite = finite.to(self.factor.device)
        self.left_out = self.left_out + (~finite & (self.factor > LEAST_SCALE))
        steps = torch.where(finite, self.steps + 1, 0.0)
        grows = steps >= GROWS_AFTER
        change = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.factor = (self.factor * change).clamp(LEAST_SCALE, MOST_SCALE)
        self.steps = torch.where(grows, 0.0, steps)

    def read(self) -> tuple[float, int]:
        """The factor, and how many steps were left out since the last call for one that was too large.

        A step that overflows at the least factor is not among them: its gradients are broken.
        """
        factor, left_out = torch.stack([self.factor, self.left_out]).tolist()
        self.left_out = torch.zeros_like(self.left_out)
        return factor, int(left_out)

    def state_dict(self) -> dict[str, float]:
        """The factor, and the steps since it has changed."""
        factor, steps = torch.stack([self.factor, self.steps]).tolist()
        return {"factor": factor, "steps": steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state_dict`."""
        self.factor, self.steps = (torch.full_like(self.factor, state[name]) for name in ("factor", "steps"))


def scale_for(dtype: str, device: torch.device) -> LossScale | None:
    """The scale of the loss for a `run.dtype`: none where the layers have the exponents of float32."""
    return LossScale(device) if dtype == "float16" else None


def buckets(tensors: Iterable[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Neighbours of one type, together of at most so many numbers; a larger tensor stays alone."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for tensor in tensors:
        if not found or tensor.numel() > room or tensor.dtype != found[-1][-1].dtype:
            found.append([])
            room = most
        found[-1].append(tensor)
        room -= tensor.numel()
    return found
