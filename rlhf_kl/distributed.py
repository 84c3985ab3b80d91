"""The processes ("ranks") that train one policy together; by default only this one. All that they exchange is here.

Each rank samples and scores its rows of a batch. Then it gets the global batch, on the CPU: targets, KL, metrics and
the next beta come from the same numbers everywhere. It trains on its own rows, whose reference states it holds;
gradients are summed before each step.

Weights can be sharded, by FSDP2 (`torch.distributed.fsdp.fully_shard`): every process keeps a part of each tensor, of
its gradient and of Adam's moments. A training pass gathers one layer at a time; all processes make the same number of
passes. Passes without gradients happen inside `unsharded`, where each process has all weights.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_kl.errors import InputError, OtherProcessFailed, RlhfKlError

T = TypeVar("T")
OLDEST_TORCH = (2, 8)  # its FSDP2 has `set_reshard_after_forward`
PATIENCE = timedelta(days=365)  # with scores: only `reward.time_limit` ends them


BUCKET = 1 << 23  # numbers of the gradients that travel together: one message costs more than many numbers
NamedTensors = Iterable[tuple[str, Tensor]]
Rows = TypeVar("Rows", bound=Sequence[Any] | Tensor)


class Ranks:
    """One process, alone. All ranks call the same methods in the same order, whatever their samples are."""

    index, count = 0, 1

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

        Errors: that of `work` where it failed; on others InputError with the same text, or OtherProcessFailed.
        """
        if self.count == 1:
            return work()
        result = failure = report = None
        try:
            result = work()
        except Exception as error:
            failure = error
            report = (error.problems if isinstance(error, InputError) else (), f"{type(error).__name__}: {error}")
        for index, other in enumerate(self.all(report, scores=scores)):
            if failure is None and other is not None:
                problems, message = other
                failed = f"process {index} failed: {message}"
                failure = InputError(*problems) if problems else OtherProcessFailed(failed)
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

    def parts(self, total: int, work: Callable[[slice], T]) -> list[T]:
        """The results of `work` on each rank's part of `total` rows, in their order. Errors: as of `run`."""
        rows = self.mine(range(total))
        return self.all(self.run(lambda: work(slice(rows.start, rows.stop))))

    def step(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter], most: float = math.inf) -> Tensor:
        """Sum the gradients over all ranks, scale them down to a joint norm of `most`, and take the step.

        Returns the norm before; where it is not finite, the step is left out.
        """
        parameters = list(parameters)
        self._sum_gradients(parameters)
        norm = self._clip_gradients(parameters, most)
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


class Group(Ranks):
    """Several processes, through torch.distributed; gradients use the backend of their device, all else gloo."""

    def __init__(self, wait: timedelta) -> None:
        """`wait`: after it, an exchange with a rank that does not answer fails."""
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.control, self.patient = (dist.new_group(backend="gloo", timeout=limit) for limit in (wait, PATIENCE))

    def all(self, value: T, *, scores: bool = False) -> list[T]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.patient if scores else self.control)
        return values

    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self.control)
        return total

    def gather(self, x: Tensor) -> Tensor:
        x = x.detach().cpu()
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x, group=self.control)
        return torch.stack(parts)

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if is_sharded(parameter) and parameter.grad is not None:
                parameter.grad.mul_(self.count)  # FSDP took the mean
        learning = [p for p in parameters if p.requires_grad and not is_sharded(p)]
        if not learning:
            return
        # Beside the gradients go flags: which are there. An expert that no token of a rank used has none.
        flags = iter(self.sum(torch.tensor([float(p.grad is not None) for p in learning])).tolist())
        transfers = []
        for bucket in buckets(learning, BUCKET):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            joined = torch.cat([part.flatten() for part in parts])
            for parameter in bucket:
                parameter.grad = None  # its memory is that of the next bucket
            transfers.append((bucket, joined, dist.all_reduce(joined, async_op=True)))
        for bucket, joined, transfer in transfers:
            transfer.wait()
            for parameter, gradient in zip(bucket, joined.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = gradient.view_as(parameter) if next(flags) else None

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
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=10))
            return int(store.add(f"rlhf-kl failed {self.control.group_name}", 1)) == 1
        except RuntimeError:
            return True


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
        failure = error if isinstance(error, RlhfKlError) else _lost_rank(error, minutes)
        if failure is None:
            raise
        failure.told = not group.is_first_to_fail()
        raise failure from error


def _lost_rank(error: Exception, minutes: float) -> RlhfKlError | None:
    """The words for an exchange that failed; None for another error."""
    message = str(error).lower()
    if not isinstance(error, dist.DistError) and "gloo" not in message:
        return None
    late = "timed out" in message or "timeout" in message
    what = f"has not answered for {minutes:g} minutes (run.wait_minutes)" if late else "has ended"
    return OtherProcessFailed(f"another process of the group {what}: --resume goes on from the last checkpoint")


# ---- sharded weights


def can_shard() -> bool:
    """Whether the installed torch is new enough."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH


def shard(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Shard the tensors of each module that are not sharded yet: layers first, then what a pass calls."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh)


@contextlib.contextmanager
def unsharded(*roots: nn.Module) -> Iterator[None]:
    """Inside, these modules have all their weights: reading and decoding need no communication. Not for gradients.

    It changes nothing for modules that are not sharded. All processes enter together.
    """
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    # Importing FSDP takes most of a second, so its modules are recognised by a method.
    parts: list[Any] = [module for module in modules if hasattr(module, "set_reshard_after_forward")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            _forget_passes(part)
            part.reshard()
            # The backward pass needs the root again at once.
            part.set_reshard_after_forward(part not in roots, recurse=False)


def _forget_passes(part: Any) -> None:
    """Clear FSDP's list of passes: passes without a backward pass would let it grow for the whole run."""
    group = getattr(part._get_fsdp_state(), "_fsdp_param_group", None)
    order = getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)
    for passes in (getattr(group, "_post_forward_indices", None), order):
        if passes is not None:
            passes.clear()


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


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is sharded: this process has only a part of it."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """This process's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def held_share(tensors: Iterable[Tensor]) -> float:
    """The share of all numbers that this process holds: 1 if nothing is sharded."""
    sizes = [(local(tensor).numel(), tensor.numel()) for tensor in tensors]
    return sum(part for part, _ in sizes) / max(1, sum(size for _, size in sizes))


def full(tensor: Any) -> Tensor:
    """The full tensor; all processes call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def local_like(value: Tensor, like: Any) -> Tensor:
    """This process's part of `value`, sharded as `like` is; it shares the memory of `value`.

    If `value` is sharded and `like` is not, `value` is gathered: all processes call this together.
    """
    if not is_sharded(like):
        return full(value)
    if is_sharded(value):
        return local(value)
    (axis,) = (placement.dim for placement in like.placements)  # FSDP cuts as torch.chunk does
    each = -(-value.shape[axis] // like.device_mesh.size())
    begin = min(each * like.device_mesh.get_local_rank(), value.shape[axis])
    return value.narrow(axis, begin, local(like).shape[axis])


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by name, tied ones by their first; each is unsharded when it is its turn.

    All processes read this together, to its end.
    """
    for tensor, names in _named_tensors(module):
        yield names[0], full(tensor.detach())


def _named_tensors(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Parameters and saved buffers, each with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `tensors_of`; tied tensors may have any of their names, and further tensors are ignored.

    Errors: InputError, before any change, for tensors that are missing or of another shape.
    """
    named = _named_tensors(module)
    fitting = [[tensors[n] for n in names if n in tensors and tensors[n].shape == x.shape] for x, names in named]
    if missing := sorted(names[0] for (_, names), values in zip(named, fitting, strict=True) if not values):
        raise InputError(f"tensors are missing or of another shape: {', '.join(missing[:3])}")
    for (tensor, _), values in zip(named, fitting, strict=True):
        local(tensor).copy_(local_like(values[0], tensor))


def slots_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The state of an optimizer, as `{number}.{name}`; see `tensors_of`."""
    for number, slot in sorted(optimizer.state_dict()["state"].items()):  # a resumed one has them in another order
        for name, value in sorted(slot.items()):
            yield f"{number}.{name}", full(torch.as_tensor(value))


@torch.no_grad()
def load_slots(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the state of `slots_of`; the parameter groups stay unchanged."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()  # frees its memory
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        like = parameters[int(number)]
        slot = torch.empty_like(like, dtype=value.dtype) if value.shape == like.shape else torch.empty_like(value)
        local(slot).copy_(local_like(value, slot))  # `value` may be a mapped file
        slots.setdefault(int(number), {})[name] = slot
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
