"""The sum of gradients over the processes; buckets of them travel while the backward pass goes on.

Source: Li et al. 2020, "PyTorch Distributed" (2006.15704), section 3.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_kl.sharding import is_sharded

BUCKET = 1 << 23  # numbers of the gradients that travel together: one message costs more than many numbers


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
