"""The processes ("ranks") that train one policy together; by default only this one. All that they exchange is here.

Each rank samples and scores its rows of a batch. Then it gets the global batch, on the CPU: targets, KL, metrics and
the next beta come from the same numbers everywhere. It trains on its own rows, whose reference states it holds;
gradients are summed before each step, from the last backward pass on.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_kl.errors import InputError, OtherProcessFailed, RlhfKlError, ServiceFailed
from rlhf_kl.gradients import GradientSum, LossScale
from rlhf_kl.heartbeat import Heartbeat
from rlhf_kl.sharding import is_sharded, local

T = TypeVar("T")
PATIENCE = timedelta(days=365)  # with scores: only `reward.time_limit` ends them
Rows = TypeVar("Rows", bound=Sequence[Any] | Tensor)


class Ranks:
    """One process, alone. All ranks call the same methods in the same order, whatever their samples are."""

    index, count = 0, 1
    control: Any = None  # the torch group of what is not a gradient
    writing: Any = None  # that of checkpoints, which may be written by a thread

    @property
    def writes(self) -> bool:
        """Whether this one writes the run's folder."""
        return self.index == 0

    def mine(self, rows: Rows) -> Rows:
        """This rank's part of the rows of a global batch: neighbours, equally many if their number is divisible."""
        total = len(rows)
        return rows[total * self.index // self.count : total * (self.index + 1) // self.count]  # type: ignore[return-value]

    def all(self, value: T, *, scores: bool = False) -> list[T]:
        """The values of all ranks, in their order; anything that pickles. `scores`: wait for them without a limit."""
        del scores
        return [value]

    def first(self, value: T) -> T:
        """The value of the first rank."""
        return self.all(value)[0]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on the CPU."""
        return x.detach().cpu()

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, on the CPU: (count, *shape)."""
        return x.detach().cpu().unsqueeze(0)

    def run(self, work: Callable[[], T], *, scores: bool = False) -> T:
        """What `work()` returns; if it fails on one rank, all raise. `scores`: it may call a reward, see `all`.

        Errors: that of `work` where it failed; on others InputError or ServiceFailed with the same text, or
        OtherProcessFailed. ServiceFailed is raised on all or on none, since it calls for a checkpoint.
        """
        if self.count == 1:
            return work()
        result = failure = report = None
        try:
            result = work()
        except Exception as error:
            failure, report = error, _report(error)
        reports = enumerate(self.all(report, scores=scores))
        others = [_failure(index, *each) for index, each in reports if each is not None]
        worst = min(others, key=lambda error: isinstance(error, ServiceFailed), default=None)
        if failure is None or (isinstance(failure, ServiceFailed) and not isinstance(worst, ServiceFailed)):
            failure = worst
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def first_before_others(self, work: Callable[[], T]) -> T:
        """As `run`; the first rank works before the others, to fill caches for them."""
        if not self.writes:
            self.run(lambda: None)
        result = self.run(work)
        if self.writes:
            self.run(lambda: None)
        return result

    def each(self, work: Callable[[], T], *, scores: bool = False) -> list[T]:
        """What `work()` returns on each rank, in their order. Errors: as of `run`."""
        return self.all(self.run(work, scores=scores))

    def parts(self, total: int, work: Callable[[slice], T]) -> list[T]:
        """The results of `work` on each rank's part of `total` rows, in their order. Errors: as of `run`."""
        rows = self.mine(range(total))
        return self.each(lambda: work(slice(rows.start, rows.stop)))

    def sending(self, parameters: Iterable[nn.Parameter], *, last: bool = True) -> AbstractContextManager[None]:
        """Around a backward pass; in the `last` one before a step gradients travel as soon as they are complete.

        `parameters`: those of the step. Then `step` or `drop` follows.
        """
        del parameters, last
        return contextlib.nullcontext()

    def drop(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Leave a step out, with its gradients."""
        self._sum_gradients(list(parameters))  # some travel already
        optimizer.zero_grad()

    def step(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        most: float = math.inf,
        scale: LossScale | None = None,
    ) -> Tensor:
        """Sum the gradients over all ranks, scale them down to a joint norm of `most`, and take the step.

        `scale`: of the loss that they come from. Returns the norm before; where it is not finite, the step is left out.
        """
        parameters = list(parameters)
        self._sum_gradients(parameters)
        if scale is not None:
            scale.remove(parameters)
        norm = self._clip_gradients(parameters, most)
        if scale is not None:
            scale.observe(norm.isfinite())
        fused = optimizer.defaults.get("fused")
        if fused:  # its kernels leave the step out themselves: nothing waits for the device
            optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        if fused or norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give every parameter the sum of its gradients over all ranks; without any gradient it keeps none."""

    def _clip_gradients(self, parameters: Sequence[nn.Parameter], most: float) -> Tensor:
        """Scale all gradients down if their joint norm is above `most`; returns the norm before."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if most < math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm


def _report(error: Exception) -> tuple[type[RlhfKlError], Sequence[str]]:
    """What the other ranks get to know of a failure, for `_failure`."""
    if isinstance(error, InputError):
        return InputError, error.problems
    if isinstance(error, ServiceFailed):
        return ServiceFailed, [str(error)]
    return OtherProcessFailed, [f"{type(error).__name__}: {error}"]


def _failure(index: int, kind: type[RlhfKlError], texts: Sequence[str]) -> RlhfKlError:
    """The failure of rank `index`, to be raised on another one."""
    return OtherProcessFailed(f"process {index} failed: {texts[0]}") if kind is OtherProcessFailed else kind(*texts)


class Group(Ranks):
    """Several processes, through torch.distributed; gradients use the backend of their device, all else gloo."""

    exchanges = 0  # that this rank has begun
    _total: GradientSum | None = None  # of the next step, where its gradients travel already

    def __init__(self, wait: timedelta) -> None:
        """`wait`: after it, an exchange with a rank that does not answer fails."""
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo", timeout=wait)
        self.heart = Heartbeat(self.control.group_name, self.index, self.count, lambda: self.exchanges)
        self.writing = dist.new_group(backend="gloo", timeout=wait)
        self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)  # all have told their first sign of life

    def all(self, value: T, *, scores: bool = False) -> list[T]:
        self.exchanges += 1
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.patient if scores else self.control)
        return values

    def sum(self, x: Tensor) -> Tensor:
        self.exchanges += 1
        total = x.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self.control)
        return total

    def gather(self, x: Tensor) -> Tensor:
        self.exchanges += 1
        x = x.detach().cpu()
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x, group=self.control)
        return torch.stack(parts)

    def sending(self, parameters: Iterable[nn.Parameter], *, last: bool = True) -> AbstractContextManager[None]:
        parameters = list(parameters)
        if not last or any(map(is_sharded, parameters)):  # FSDP sends its own meanwhile, and orders must not mix
            return contextlib.nullcontext()
        self._total = GradientSum(parameters)
        return self._total.early()

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if is_sharded(parameter) and parameter.grad is not None:
                parameter.grad.mul_(self.count)  # FSDP took the mean
        total, self._total = self._total or GradientSum(parameters), None
        total.finish(self.sum)

    def _clip_gradients(self, parameters: Sequence[nn.Parameter], most: float) -> Tensor:
        if not any(map(is_sharded, parameters)):
            return super()._clip_gradients(parameters, most)
        shards = whole = torch.zeros((), dtype=torch.float64)
        gradients = [(is_sharded(p), local(p.grad)) for p in parameters if p.grad is not None]
        for sharded, gradient in gradients:
            square = torch.linalg.vector_norm(gradient).double().cpu().square()
            shards, whole = (shards + square, whole) if sharded else (shards, whole + square)
        norm = (self.sum(shards) + whole).sqrt()
        for _, gradient in gradients if norm > most else ():
            gradient.mul_(float(most / (norm + 1e-6)))
        return norm

    def is_first_to_fail(self) -> bool:
        """Whether no other rank has failed before; one that cannot be asked counts as none."""
        return self.heart.ask(lambda store: store.add("failed", 1)) in (1, None)


@contextlib.contextmanager
def joined_group(minutes: float) -> Iterator[Group]:
    """The group that a launcher started; of its failures the first one is told, the others follow from it.

    The launcher ends all ranks when one has failed. `minutes`: the limit of every wait but that for scores.
    """
    # Else gloo's threads may abort a process that ends.
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    group = Group(timedelta(minutes=minutes))
    try:
        yield group
    except Exception as error:
        with _undisturbed():
            failure = error if isinstance(error, RlhfKlError) else _lost_rank(error, minutes, group.heart)
            if failure is None:
                raise
            failure.told = not group.is_first_to_fail()
        raise failure from error
    finally:
        group.heart.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """SIGTERM does not end the block: with it a launcher ends the others as soon as it sees that one has ended."""
    handled = threading.current_thread() is threading.main_thread()  # only there Python handles signals
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if handled else None
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGTERM, before)


def _lost_rank(error: Exception, minutes: float, heart: Heartbeat) -> RlhfKlError | None:
    """The words for an exchange that failed, with the ranks that show no sign of life; None for another error."""
    message = str(error).lower()
    if not isinstance(error, dist.DistError) and "gloo" not in message:
        return None
    late = "timed out" in message or "timeout" in message
    what = f"not answered for {minutes:g} minutes (run.wait_minutes)" if late else "ended"
    who = heart.missing(late=late) or "another process of the group"
    have = "have" if who.startswith("processes") else "has"
    return OtherProcessFailed(f"{who} {have} {what}: --resume goes on from the last checkpoint")
