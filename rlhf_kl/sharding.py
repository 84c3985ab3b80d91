"""Weights that are sharded over the processes of a group, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every process keeps a part of each tensor, of its gradient and of Adam's moments. A training pass gathers one layer at a
time; all processes make the same number of passes. Passes without gradients happen inside `whole`: there each process
has all weights, and may make any number of passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.errors import InputError

OLDEST_TORCH = (2, 8)  # its FSDP2 has `set_reshard_after_forward`


def can_spread() -> bool:
    """Whether the installed torch is new enough."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH


def spread(layers: Iterable[nn.Module], root: nn.Module | None, device: torch.device) -> None:
    """Shard the tensors of `layers`, each gathered separately, and the rest of `root`, the module of a pass.

    Without a root the rest stays whole.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*layers, *([root] if root is not None else [])]:
        fully_shard(module, mesh=mesh)


@contextlib.contextmanager
def whole(*roots: nn.Module) -> Iterator[None]:
    """Inside, these modules have all their weights: reading and decoding need no communication. Not for gradients.

    It changes nothing for modules that are not sharded. All processes enter together.
    """
    parts = {id(part): part for root in roots for part in _spread_parts(root)}
    for part in parts.values():
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts.values():
            _forget_passes(part)
            part.reshard()
            # The backward pass needs the root again at once.
            part.set_reshard_after_forward(part not in roots, recurse=False)


def _forget_passes(part: Any) -> None:
    """Clear FSDP's list of passes: passes without a backward pass would let it grow for the whole run."""
    group = getattr(part._get_fsdp_state(), "_fsdp_param_group", None)
    for notes in (getattr(group, "_post_forward_indices", None), _order_of(group)):
        if notes is not None:
            notes.clear()


def _order_of(group: Any) -> Any:
    return getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)


def _spread_parts(root: nn.Module) -> Iterator[Any]:
    # Importing FSDP takes most of a second, so its modules are recognised by a method.
    return (module for module in root.modules() if hasattr(module, "set_reshard_after_forward"))


def is_spread(tensor: Tensor) -> bool:
    """Whether the tensor is sharded: this process has only a part of it."""
    return hasattr(tensor, "full_tensor")


def part_of(tensor: Any) -> Tensor:
    """This process's part of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    part: Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return part


def held_share(tensors: Iterable[Tensor]) -> float:
    """The share of all numbers that this process holds: 1 if nothing is sharded."""
    sizes = [(part_of(tensor).numel(), tensor.numel()) for tensor in tensors]
    return sum(part for part, _ in sizes) / max(1, sum(size for _, size in sizes))


def all_of(tensor: Any) -> Tensor:
    """The whole tensor; all processes call this together."""
    whole_tensor: Tensor = tensor.full_tensor() if is_spread(tensor) else tensor
    return whole_tensor


def part_like(value: Tensor, like: Any) -> Tensor:
    """This process's part of `value`, sharded as `like` is; it shares the memory of `value`.

    If `value` is sharded and `like` is not, `value` is gathered: all processes call this together.
    """
    if not is_spread(like):
        return all_of(value)
    if is_spread(value):
        return part_of(value)
    (axis,) = (placement.dim for placement in like.placements)  # FSDP cuts as torch.chunk does
    each = -(-value.shape[axis] // like.device_mesh.size())
    begin = min(each * like.device_mesh.get_local_rank(), value.shape[axis])
    return value.narrow(axis, begin, part_of(like).shape[axis])


def _spread_like(value: Tensor, like: Any) -> Tensor:
    """A whole `value` sharded as `like` is; `value` itself if `like` is not sharded."""
    if not is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def tensors_of(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, whole; tied ones by their first name.

    All processes call this together; one without `keep` gets {}.
    """
    saved, found = module.state_dict(), {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in saved:
            there = all_of(tensor.detach())
            if keep:
                found[name] = there.cpu().contiguous()
    return found


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `tensors_of`; tied tensors may have any of their names, and further tensors are ignored.

    Errors: InputError, before any change, for tensors that are missing or of another shape.
    """
    saved = module.state_dict()
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in _named_tensors(module):
        if name in saved:
            names.setdefault(id(tensor), (tensor, []))[1].append(name)
    missing, found = [], []
    for tensor, aliases in names.values():
        value = next((tensors[name] for name in aliases if name in tensors), None)
        if value is None or value.shape != tensor.shape:
            missing.append(aliases[0])
        else:
            found.append((tensor, value))
    if missing:
        raise InputError(f"tensors are missing or of another shape: {', '.join(sorted(missing)[:3])}")
    for tensor, value in found:
        part_of(tensor).copy_(part_like(value, tensor))


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    kinds = (module.named_parameters, module.named_buffers)
    return [pair for named in kinds for pair in named(remove_duplicate=False)]


def slots_of(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Tensor]:
    """The state of an optimizer, as `{number}.{name}`, whole; see `tensors_of`."""
    found = {}
    for index, slot in optimizer.state_dict()["state"].items():
        for name, value in slot.items():
            there = all_of(torch.as_tensor(value))
            if keep:
                found[f"{index}.{name}"] = there.cpu().contiguous()
    return found


def load_slots(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the state of `slots_of`; the parameter groups stay unchanged."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        like = parameters[int(number)]
        slots.setdefault(int(number), {})[name] = _spread_like(value, like) if value.shape == like.shape else value
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
