"""Weights that are sharded over the processes, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Every process keeps a part of each tensor, of its gradient and of Adam's moments. A pass gathers one layer at a time, so
all processes make the same number of passes: those of training, and those without gradients inside `layer_by_layer`.
A model samples inside `unsharded`, where each process has it whole: else each token would gather all layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_kl.errors import InputError

OLDEST_TORCH = (2, 9)  # distributed checkpoints in safetensors
NamedTensors = Iterable[tuple[str, Tensor]]
Read = Callable[[dict[str, Tensor]], None]
P = TypeVar("P")


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


def shard_trained(root: nn.Module, model: Any, device: torch.device, computed: torch.dtype, idle: Any) -> None:
    """Shard the layers of a transformers model and what they leave; passes call `root` with rows such as `idle`."""
    from torch.distributed.fsdp import fully_shard

    shard(layers_of(model), device, torch.float32, computed)
    bring(root, device, torch.float32)
    vectors = {parameter for parameter in root.parameters() if parameter.dim() < 2}
    fully_shard(root, mesh=_mesh(device), ignored_params=vectors)
    _begin(root, partial(root, idle))


def shard_frozen(trunk: Any, device: torch.device, idle: Any) -> None:
    """Shard the layers of a `Trunk` that is only read; embeddings and head stay whole, in float32. `idle`: rows."""
    from torch.distributed.fsdp import fully_shard

    shard(layers_of(trunk.base), device, trunk.dtype, trunk.dtype)
    bring(trunk.base, device, torch.float32)
    root = trunk.base.base_model  # shards nothing of its own: layers of one root are gathered in turn, without waiting
    fully_shard(root, mesh=_mesh(device), ignored_params=set(root.parameters()))
    _begin(root, partial(trunk.hidden, idle))


@torch.no_grad()
def _begin(root: nn.Module, read: Callable[[], Any]) -> None:
    """Make a first pass: else the first layer that samples would become a root."""
    read()
    _give_back(_parts(root))


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
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, a model has all its weights, in the type of its passes, and decoding needs no communication.

    It changes nothing for a model that is not sharded. All processes enter together. Not for gradients, and not inside
    of `layer_by_layer`.
    """
    for part in (parts := _parts(model)):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        _give_back(parts)


@contextlib.contextmanager
def layer_by_layer(*models: nn.Module) -> Iterator[None]:
    """Inside, passes without gradients gather one layer of these models at a time, beside what no layer has.

    All processes enter together, and call the layers equally often (`equally_many`).
    """
    parts = _parts(*models)
    for root in _roots(parts):
        root.unshard()
    try:
        yield
    finally:
        _give_back(parts)


def names_in_turn(model: nn.Module, base: nn.Module) -> Iterator[str]:
    """The names of the parameters of `base`, a module of `model`; when it is its turn, one is whole, with its layer.

    All processes read this together, to its end.
    """
    parts = {name: module for name, module in base.named_modules() if hasattr(module, "set_reshard_after_forward")}

    def owner(name: str) -> str:
        return max((part for part in parts if name.startswith(f"{part}.")), key=len, default="")

    for part, names in groupby([name for name, _ in base.named_parameters()], owner):
        gathered = [parts[part]] if part else _roots(_parts(model))
        for each in gathered:
            each.unshard()
        try:
            yield from names
        finally:
            for each in gathered:
                each.reshard()


def equally_many(passes: Sequence[P], idle: P, device: torch.device) -> Iterator[P]:
    """These passes, and `idle` ones as long as another process still makes its own. All processes call together."""
    most = torch.tensor(len(passes), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    yield from passes
    yield from [idle] * (int(most) - len(passes))


def has_shards(*models: nn.Module) -> bool:
    """Whether a model has a tensor that is sharded now: not inside of `unsharded`."""
    return any(is_sharded(parameter) for model in models for parameter in model.parameters())


def may_shard(model: nn.Module) -> bool:
    """Whether FSDP holds the tensors of a model, which may be whole now."""
    return bool(_parts(model))


def _parts(*models: nn.Module) -> list[Any]:
    """The modules whose tensors FSDP shards, a root before its layers; `within` of a model names others' it reads."""
    # Importing FSDP takes most of a second, so its modules are recognised by a method.
    holders = [holder for model in models for holder in (*getattr(model, "within", ()), model)]
    modules = dict.fromkeys(module for holder in holders for module in holder.modules())
    return [module for module in modules if hasattr(module, "set_reshard_after_forward")]


def _roots(parts: Sequence[Any]) -> list[Any]:
    inner = {id(module) for part in parts for module in part.modules() if module is not part}
    return [part for part in parts if id(part) not in inner]


def _give_back(parts: Sequence[Any]) -> None:
    """Keep this process's shards alone, as before a training pass."""
    roots = _roots(parts)
    for part in parts:
        part.reshard()
        part.set_reshard_after_forward(part not in roots, recurse=False)  # the backward pass needs a root at once
    for root in roots:
        _forget_passes(root, parts)


def sum_gradients(modules: Iterable[Any], now: bool) -> None:
    """Whether the next backward pass sums the gradients of sharded modules over the processes, or keeps them whole."""
    for module in modules:
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(now)


def _forget_passes(root: Any, parts: Iterable[Any]) -> None:
    """Clear FSDP's list of passes: passes without a backward pass would let it grow for the whole run."""
    if hasattr(root, "reset_iter_state"):  # from torch 2.13 on
        root.reset_iter_state()
        return
    for part in parts:  # private names of the versions before
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
