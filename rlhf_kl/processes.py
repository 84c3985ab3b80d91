"""The processes that train one policy together; by default only this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_kl.errors import InputError, OtherProcessFailed, RlhfKlError
from rlhf_kl.heartbeat import Heartbeat
from rlhf_kl.sharding import is_spread, part_of

T = TypeVar("T")
Failure = TypeVar("Failure", bound=RlhfKlError)
BUCKET = 1 << 24  # numbers in one transfer: 64 MiB of float32


@dataclass(frozen=True)
class Processes:
    """One process of a group. All communication between processes uses its methods.

    Every process calls the same methods in the same order, independent of its samples.
    """

    count: int = 1
    index: int = 0

    @property
    def writes(self) -> bool:
        """Whether this one writes the run's folder."""
        return self.index == 0

    def rows(self, total: int) -> slice:
        """This process's rows of a global batch of `total`; equal numbers if `total` is divisible."""
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest value of each element over all processes."""
        return x

    def sum_gradients(self, parameters: Iterable[nn.Parameter], figure: float = 0.0) -> float:
        """Give every parameter the sum of its gradients over all processes; without any gradient it keeps none.

        Returns the sum of `figure` over all processes.
        """
        del parameters
        return figure

    def clip_gradients(self, parameters: Iterable[nn.Parameter], most: float) -> float:
        """Scale all gradients down if their joint norm is above `most`; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, most))

    def all(self, value: T) -> list[T]:
        """The values of all processes, in their order; anything that pickles."""
        return [value]

    def first(self, value: T) -> T:
        """The value of the first process."""
        return value

    def together(self, work: Callable[[], T]) -> T:
        """What `work()` returns; if it fails on one process, all processes raise.

        Errors: that of `work` where it failed; on others InputError with the same text, or OtherProcessFailed.
        """
        return work()

    def results(self, work: Callable[[], T]) -> list[T]:
        """What `work()` returns on every process, in their order; anything that pickles. Errors: as of `together`."""
        return [work()]

    def parts(self, total: int, work: Callable[[slice], T]) -> list[T]:
        """The results of `work` on each process's part of `total` rows, in their order. Errors: as of `together`."""
        return self.results(lambda: work(self.rows(total)))

    def first_before_others(self, work: Callable[[], T]) -> T:
        """What `work()` returns; the first process runs it first, to fill caches for the others."""
        if self.writes:
            result = self.together(work)
            self.together(lambda: None)
            return result
        self.together(lambda: None)
        return self.together(work)

    def shared(self, error: Failure) -> Failure:
        """An error that every process raises; the first process reports it."""
        error.shared, error.told = True, not self.writes
        return error

    def agree(self, reason: str | None) -> str | None:
        """The first reason that a process has; None where none has one."""
        return next((each for each in self.all(reason) if each is not None), None)


class Group(Processes):
    """Several processes, through torch.distributed.

    Figures and decisions use gloo, with a long timeout for slow reward functions; gradients use the backend of their
    device.
    """

    def __init__(self, control: Any) -> None:
        """`control`: a gloo group of all processes."""
        super().__init__(dist.get_world_size(), dist.get_rank())
        object.__setattr__(self, "control", control)

    def _reduced(self, x: Tensor, operation: Any) -> Tensor:
        here = x.detach().to("cpu", copy=True)
        dist.all_reduce(here, operation, group=self.control)  # type: ignore[attr-defined]
        return here.to(x.device)

    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], figure: float = 0.0) -> float:
        every = []
        for parameter in parameters:
            if not is_spread(parameter):
                every += [parameter] * parameter.requires_grad
            elif parameter.grad is not None:
                parameter.grad.mul_(self.count)  # FSDP took the mean
        if not every:
            return float(self.sum(torch.tensor(figure, dtype=torch.float64)))
        # A flag for each gradient is sent behind them; a missing gradient is sent as zeros.
        tail = torch.tensor([*(float(p.grad is not None) for p in every), figure]).to(every[-1])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in every]
        for bucket in _buckets([*gradients, tail]):
            _sum_in_place(bucket)
        *somewhere, summed = tail.tolist()
        for parameter, gradient, there in zip(every, gradients, somewhere, strict=True):
            parameter.grad = gradient if there else None
        return float(summed)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], most: float) -> float:
        every = list(parameters)
        if not any(map(is_spread, every)):
            return super().clip_gradients(every, most)
        parts = whole = torch.zeros((), dtype=torch.float64)
        gradients = [(is_spread(p), part_of(p.grad)) for p in every if p.grad is not None]
        for spread, gradient in gradients:
            square = torch.linalg.vector_norm(gradient).double().cpu().square()
            parts, whole = (parts + square, whole) if spread else (parts, whole + square)
        norm = float((self.sum(parts) + whole).sqrt())
        for _, gradient in gradients if norm > most else ():
            gradient.mul_(most / (norm + 1e-6))
        return norm

    def all(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.control)  # type: ignore[attr-defined]
        return values

    def first(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)  # type: ignore[attr-defined]
        return values[0]

    def together(self, work: Callable[[], T]) -> T:
        kept: list[T] = []
        self.results(lambda: kept.append(work()))  # what it returns stays here
        return kept[0]

    def results(self, work: Callable[[], T]) -> list[T]:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        problems = failure.problems if isinstance(failure, InputError) else None
        words = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes: list[Any] = self.all((result, problems, words))
        for index, (_, their_problems, their_words) in enumerate(outcomes):
            if failure is None and their_problems is not None:
                failure = InputError(*their_problems)
            elif failure is None and their_words is not None:
                failure = OtherProcessFailed(f"process {index} failed: {their_words}")
        if failure is not None:
            raise self.shared(failure) if isinstance(failure, RlhfKlError) else failure
        return [result for result, _, _ in outcomes]


def join_group() -> tuple[Group, Heartbeat]:
    """The group of all processes, and its heartbeat, which is running."""
    group = Group(dist.new_group(backend="gloo", timeout=timedelta(days=30)))
    # A store of its own: a waiting collective would block a shared connection.
    host, store = os.environ["MASTER_ADDR"], None
    if group.writes:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = group.first(store.port if store is not None else 0)
    store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    heartbeat = Heartbeat(store, group.index, group.count)
    heartbeat.start()
    return group, heartbeat


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type, for one transfer."""
    buckets: list[list[Tensor]] = []
    for tensor in tensors:
        last = buckets[-1] if buckets else []
        if not last or last[0].dtype != tensor.dtype or sum(map(Tensor.numel, last)) + tensor.numel() > BUCKET:
            buckets.append([])
        buckets[-1].append(tensor)
    return buckets


def _sum_in_place(tensors: list[Tensor]) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0])
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
