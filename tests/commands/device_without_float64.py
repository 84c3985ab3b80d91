"""A device in python that has no float64, as MPS has none; `python device_without_float64.py train ...` runs on it.

Its tensors hold CPU tensors. Whatever would make one of float64 raises, and so does an operation that mixes them with
tensors of the CPU.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("single")
torch.single.get_amp_supported_dtype = lambda: [torch.bfloat16]
DEVICE = torch.device("single:0")
MAY_MIX = ("_to_copy", "copy_", "index.", "index_put")  # these take the other device's tensors on real ones too


class Held(torch.Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Held:
        if held.dtype == torch.float64:
            raise TypeError("the device has no float64")
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def storage(self) -> Any:
        return self.held.storage()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = Held(self.held.detach().clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = made = torch.nn.Parameter(made, self.requires_grad) if hasattr(self, "_is_param") else made
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, dict(kwargs or {}))


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = any(isinstance(x, Held) for x in tensors)
    mixed = ours and any(x.dim() > 0 and not isinstance(x, Held) for x in tensors)
    if mixed and not any(name in str(func) for name in MAY_MIX):
        raise RuntimeError(f"{func}: tensors of two devices")
    if kwargs.get("device") is not None:
        ours = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs["device"] = "cpu"
    if str(func).startswith("aten.copy_"):  # into its first argument, of whatever device that is
        ours = isinstance(args[0], Held)
    plain = tree_map(lambda x: x.held if isinstance(x, Held) else x, (args, kwargs))
    made = func(*plain[0], **plain[1])
    if not ours:
        return made
    known = {id(x.held): x for x in tensors if isinstance(x, Held)}  # in-place operations return their argument
    return tree_map(lambda x: (known[id(x)] if id(x) in known else Held(x)) if isinstance(x, torch.Tensor) else x, made)


class Everywhere(TorchDispatchMode):
    """Tensors that are made on the device from nothing, or moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, dict(kwargs or {}))


class FromLists(TorchFunctionMode):
    """`torch.tensor(list, device=...)` fills memory of the device without an operation that could be seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func is torch.tensor else None
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


def main(arguments: list[str]) -> int:
    from rlhf_kl import cli
    from rlhf_kl.commands import evaluate, generate, train
    from rlhf_kl.ops import masked

    masked.WITHOUT_FLOAT64.add(DEVICE.type)
    for command in (evaluate, generate, train):
        command.make_accelerator = lambda *_, **__: SimpleNamespace(device=DEVICE)
    with FromLists(), Everywhere():
        return cli.run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
