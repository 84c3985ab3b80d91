"""Weights that are sharded over the processes, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every process keeps a part of each tensor, of its gradient and of Adam's moments. A training pass gathers one layer at a
time; all processes make the same number of passes. Passes without gradients happen inside `unsharded`, where each
process has all weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_kl.errors import InputError

OLDEST_TORCH = (2, 9)  # distributed checkpoints in safetensors
NamedTensors = Iterable[tuple[str, Tensor]]
Read = Callable[[dict[str, Tensor]], None]


def can_shard() -> bool:
    """Whether the installed torch is new enough."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST_TORCH


def shard(layers: Iterable[nn.Module], device: torch.device, stored: torch.dtype, computed: torch.dtype) -> None:
    """Shard the matrices of each layer, and give what a process does not keep back before the next one.

    They come to the device as `stored`, layer by layer; passes gather them as `computed`, and sum their gradients in
    float32. Vectors (norms, biases) are small, and float32 in every pass: each process has them whole.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    cast = None if computed == stored else computed
    precision = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        bring(layer, device, stored)
        vectors = {parameter for parameter in layer.parameters() if parameter.dim() < 2}
        fully_shard(layer, mesh=_mesh(device), mp_policy=precision, ignored_params=vectors)


def shard_trained(root: nn.Module, model: Any, device: torch.device, computed: torch.dtype) -> None:
    """Shard the layers of a transformers model and what they leave; training passes call `root`, which has them."""
    from torch.distributed.fsdp import fully_shard

    shard(layers_of(model), device, torch.float32, computed)
    bring(root, device, torch.float32)
    vectors = {parameter for parameter in root.parameters() if parameter.dim() < 2}
    fully_shard(root, mesh=_mesh(device), ignored_params=vectors)
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # else the first layer that samples becomes a root


def layers_of(model: Any) -> list[nn.Module]:
    """The layers of a transformers model, by the class names that the model lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def bring(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move to the device what is not sharded yet; matrices get the dtype, vectors float32."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_sharded(tensor):
            kind = dtype if tensor.dim() > 1 else torch.float32
            tensor.data = tensor.data.to(device, kind if isinstance(tensor, nn.Parameter) else tensor.dtype)


@functools.cache
def _mesh(device: torch.device) -> Any:
    return dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))


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


def sum_gradients(modules: Iterable[Any], now: bool) -> None:
    """Whether the next backward pass sums the gradients of sharded modules over the processes, or keeps them whole."""
    for module in modules:
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(now)


def _forget_passes(part: Any) -> None:
    """Clear FSDP's list of passes: passes without a backward pass would let it grow for the whole run."""
    group = getattr(part._get_fsdp_state(), "_fsdp_param_group", None)
    order = getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)
    for passes in (getattr(group, "_post_forward_indices", None), order):
        if passes is not None:
            passes.clear()


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


def parts_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `tensors_of`, but what is sharded stays so."""
    for tensor, names in _named_tensors(module):
        yield names[0], tensor.detach()


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers by name, tied ones by their first; each is unsharded when it is its turn.

    All processes read this together, to its end.
    """
    for name, tensor in parts_of(module):
        yield name, full(tensor)


def _named_tensors(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Parameters and saved buffers, each with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], read: Read | None = None) -> None:
    """Load the tensors of `tensors_of`; tied tensors may have any of their names, and further tensors are ignored.

    `read(into)`: fills tensors by name, where `tensors` has only their shapes and dtypes.
    Errors: InputError, before any change, for tensors that are missing or of another shape.
    """
    named = _named_tensors(module)
    fitting = [[n for n in names if n in tensors and tensors[n].shape == x.shape] for x, names in named]
    if missing := sorted(names[0] for (_, names), found in zip(named, fitting, strict=True) if not found):
        raise InputError(f"tensors are missing or of another shape: {', '.join(missing[:3])}")
    into = {found[0]: tensor.detach() for (tensor, _), found in zip(named, fitting, strict=True)}
    (read or partial(_copy, tensors))(into)


def _copy(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        local(tensor).copy_(local_like(tensors[name], tensor))  # which may be a mapped file


def slots_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The state of an optimizer, as `{number}.{name}`; of sharded tensors they are sharded."""
    for number, slot in sorted(optimizer.state_dict()["state"].items()):  # a resumed one has them in another order
        for name, value in sorted(slot.items()):
            yield f"{number}.{name}", torch.as_tensor(value)


@torch.no_grad()
def load_slots(optimizer: Optimizer, tensors: Mapping[str, Tensor], read: Read | None = None) -> None:
    """Load the state of `slots_of`; the parameter groups stay unchanged. `read`: see `load_tensors`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()  # frees its memory
    into = {}
    for key, value in tensors.items():
        like = parameters[int(key.split(".", 1)[0])]
        like = like if value.shape == like.shape else torch.empty(value.shape)
        into[key] = torch.empty_like(like, dtype=value.dtype)
    (read or partial(_copy, tensors))(into)
    slots: dict[int, dict[str, Tensor]] = {}
    for key, slot in into.items():
        number, name = key.split(".", 1)
        slots.setdefault(int(number), {})[name] = slot
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
