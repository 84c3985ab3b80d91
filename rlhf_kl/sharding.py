"""Weights that are sharded over the processes of a group, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every process keeps a part of each tensor, of its gradient and of Adam's moments. A training pass gathers one layer at a
time; all processes make the same number of passes. Passes without gradients happen inside `unsharded`: there each
process has all weights, and may make any number of passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.errors import InputError

OLDEST_TORCH = (2, 8)  # its FSDP2 has `set_reshard_after_forward`


def can_shard() -> bool:
    """Whether the installed torch is new enough."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH


def shard(layers: Iterable[nn.Module], root: nn.Module | None, device: torch.device) -> None:
    """Shard the tensors of `layers`, each gathered separately, and the rest of `root`, the module of a pass.

    Without a root the rest is not sharded.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*layers, *([root] if root is not None else [])]:
        fully_shard(module, mesh=mesh)


@contextlib.contextmanager
def unsharded(*roots: nn.Module) -> Iterator[None]:
    """Inside, these modules have all their weights: reading and decoding need no communication. Not for gradients.

    It changes nothing for modules that are not sharded. All processes enter together.
    """
    parts = {id(part): part for root in roots for part in _sharded_modules(root)}
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
    order = getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)
    for passes in (getattr(group, "_post_forward_indices", None), order):
        if passes is not None:
            passes.clear()


def _sharded_modules(root: nn.Module) -> Iterator[Any]:
    # Importing FSDP takes most of a second, so its modules are recognised by a method.
    return (module for module in root.modules() if hasattr(module, "set_reshard_after_forward"))


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


def tensors_of(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, unsharded; tied ones by their first name.

    All processes call this together; one without `keep` gets {}.
    """
    saved, found = module.state_dict(), {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in saved:
            gathered = full(tensor.detach())
            if keep:
                found[name] = gathered.cpu().contiguous()
    return found


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `tensors_of`; tied tensors may have any of their names, and further tensors are ignored.

    Errors: InputError, before any change, for tensors that are missing or of another shape.
    """
    saved = module.state_dict()
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
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
        local(tensor).copy_(local_like(value, tensor))


def slots_of(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Tensor]:
    """The state of an optimizer, as `{number}.{name}`, unsharded; see `tensors_of`."""
    found = {}
    for index, slot in optimizer.state_dict()["state"].items():
        for name, value in slot.items():
            gathered = full(torch.as_tensor(value))
            if keep:
                found[f"{index}.{name}"] = gathered.cpu().contiguous()
    return found


def load_slots(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the state of `slots_of`; the parameter groups stay unchanged."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        like: Any = parameters[int(number)]
        if is_sharded(like) and value.shape == like.shape:
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        slots.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
