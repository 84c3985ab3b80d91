"""`python device.py LIBRARY COMMANDS RESULT`: command lines of rlhf-kl on a CUDA device that is not there.

Its tensors say that they are on cuda:0 and compute on the CPU. An operation that mixes the two raises, as on a GPU.
Operations are counted, and those that let the host wait for a GPU: what reads from it, and a copy to it that is not
`non_blocking` or not from pinned memory. It finds such crashes and waits and nothing else: there is one device, no
NCCL, no kernel of a GPU, no speed.

LIBRARY: device.cpp, built. COMMANDS: a JSON list of command lines. RESULT: a JSON file, an entry for each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import io
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The device must be there before torch looks for one.
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(
        str(Path(importlib.util.find_spec("torch").submodule_search_locations[0], "lib", name)), ctypes.RTLD_GLOBAL
    )
ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
from counts import Counts, is_view, mark_phases  # noqa: E402
from torch.utils import _foreach_utils  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._device import _device_constructors  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)

DEVICE = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # takes indices of a CPU
COPIES = {"copy_", "_to_copy", "to", "lift_fresh", "_has_compatible_shallow_copy_type", "set_"}

UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
STRICT = {"cat", "stack", "gather", "mm", "addmm", "bmm", "searchsorted", "index_select", "_fused_adamw_"}


class Mismatch(RuntimeError):
    """Tensors of two devices in one operation."""


counts = Counts()


class Fake(torch.Tensor):
    """A tensor that says it is on the device; `inner` has its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        settings = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **settings, layout=inner.layout, device=DEVICE)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = Fake(self.inner.clone())
            is_parameter = getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if is_parameter else copy
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        counts.wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of a GPU has no numpy array")


def cpu(x: Any) -> Any:
    """What the device holds, as a tensor of the CPU; anything else unchanged."""
    return x.inner if isinstance(x, Fake) else x


def on_device(x: Any) -> Any:
    return Fake(x) if isinstance(x, torch.Tensor) and not isinstance(x, Fake) else x


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of torch, on the CPU; its result is on the device if an argument is, or if it says so."""
    name, device = func._schema.name.partition("::")[2], kwargs.get("device")
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    fakes = [x for x in tensors if isinstance(x, Fake)]
    counts.operation(func, on_device=bool(fakes) or is_cuda(device))
    if fakes:
        indices = pytree.tree_leaves(args[1]) if name in INDEXING else []
        check_devices(name, [x for x in tensors if isinstance(x, Fake) or not any(x is index for index in indices)])
        to_cpu = name == "_to_copy" and device is not None and not is_cuda(device)
        to_cpu |= name == "copy_" and not isinstance(args[0], Fake)
        there = [index for index in indices if isinstance(index, torch.Tensor)]
        by_index = any(x.dtype in (torch.bool, torch.uint8) or not isinstance(x, Fake) for x in there)
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if to_cpu or by_index or repeats or name in READS:
            counts.wait(name)
    if name in ("_to_copy", "copy_") and waits_to_send(name, args, kwargs):
        counts.wait(name)
    inner_args, inner_kwargs = pytree.tree_unflatten([cpu(x) for x in flat], spec)
    if device is not None:
        inner_kwargs["device"] = torch.device("cpu")
    result = func(*inner_args, **inner_kwargs)
    if name in UNWRITTEN and result.is_floating_point():
        result.fill_(torch.nan)  # so a test fails each time that something reads it unwritten
    if not (is_cuda(device) if device is not None else fakes) or name == "_local_scalar_dense":
        return result
    usual = torch.is_inference_mode_enabled() and not any(x.is_inference() for x in fakes) and is_view(func)
    with torch.inference_mode(False) if usual else contextlib.nullcontext():  # there a view is what it is a view of
        result = pytree.tree_map(on_device, result)
    with contextlib.suppress(RuntimeError, AssertionError, KeyError):  # schemas that name no alias
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result


def waits_to_send(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy from the CPU to the device lets the host wait; a number is passed with a kernel."""
    source = args[0] if name == "_to_copy" else args[1]
    to_device = is_cuda(kwargs.get("device")) if name == "_to_copy" else isinstance(args[0], Fake)
    if not to_device or isinstance(source, Fake) or not source.numel() or (name == "copy_" and not source.dim()):
        return False
    blocks = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2]))
    return blocks or not getattr(source, "pinned", False)


def pinned(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """A copy in memory that the device reads by itself."""
    copy = x.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


def check_devices(name: str, tensors: list[torch.Tensor]) -> None:
    """A number of the CPU may meet a tensor of the device in most operations, a tensor of the CPU in none."""
    here = [x for x in tensors if not isinstance(x, Fake)]
    shapes = [tuple(x.shape) for x in here if x.dim() > 0 or name in STRICT]
    if shapes and name not in COPIES and len(here) < len(tensors):
        raise Mismatch(f"{name}: {shapes} on the CPU, the others on {DEVICE}")


class Mode(TorchDispatchMode):
    """Also operations without a tensor of the device go through `computed`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self, counts.whole():  # it comes whole in inference mode alone
                return func.decompose(*args, **(kwargs or {}))
        return computed(func, args, kwargs or {})


# ---- what torch does in C++ for a real device


def apply_to(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply`, which puts new data into old tensors; here new tensors replace them, shared ones once."""
    new: dict[int, Any] = {}
    for part in module.modules() if recurse else (module,):
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None and id(x) not in new:
                    changed = change(x.detach())
                    is_parameter = isinstance(x, torch.nn.Parameter)
                    new[id(x)] = torch.nn.Parameter(changed, x.requires_grad) if is_parameter else changed
                tensors[name] = None if x is None else new[id(x)]
    return module


torch_tensor = torch.tensor  # of numbers from the CPU


def factory(usual: Callable[..., Any], *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """A function that makes a tensor."""
    made = usual(*args, **kwargs) if device is None or is_cuda(device) else usual(*args, device=device, **kwargs)
    if usual is torch_tensor and is_cuda(device) and made.numel():
        counts.wait("tensor")
    return on_device(made) if is_cuda(device) else made


class Norm(torch.autograd.Function):
    """An RMS norm, one operation there and one back."""

    @staticmethod
    def forward(ctx: Any, states: Any, shape: Any, weight: Any, eps: float) -> Any:
        counts.operation()
        ctx.save_for_backward(states, weight)
        ctx.rest = shape, eps
        with _disable_current_modes():
            return Fake(torch_norm(states.inner, shape, weight.inner, eps))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        counts.operation()
        shape, eps = ctx.rest
        inner = [x.inner.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), _disable_current_modes():
            found = torch.autograd.grad(torch_norm(inner[0], shape, inner[1], eps), inner, cpu(gradient))
        return Fake(found[0]), None, Fake(found[1]), None


torch_norm = torch.nn.functional.rms_norm


def norm(states: Any, shape: Any, weight: Any, eps: float) -> Any:
    """As `torch.nn.functional.rms_norm`."""
    return (Norm.apply if isinstance(states, Fake) else torch_norm)(states, shape, weight, eps)


class Attention(torch.autograd.Function):
    """Scaled dot-product attention, one operation there and one back."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """q, k, v; then the mask, and whether it is causal, and the scale."""
        counts.operation()
        ctx.save_for_backward(*args[:3])
        ctx.rest = (cpu(args[3]), *args[4:])
        with _disable_current_modes():
            return Fake(products(*map(cpu, args[:3]), *ctx.rest))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        counts.operation()
        inner = [x.inner.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), _disable_current_modes():
            found = torch.autograd.grad(products(*inner, *ctx.rest), inner, cpu(gradient))
        return (*map(Fake, found), None, None, None)


def products(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """Attention as matrix products."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1, output_size=q.shape[1]) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.nan_to_num(torch.softmax(scores.float(), -1)).to(v.dtype) @ v


def attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, *rest: Any, is_causal: bool = False, **options: Any
) -> Any:
    """As `torch.nn.functional.scaled_dot_product_attention`, autocast included."""
    if q.device.type != "cuda":
        return torch_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    return Attention.apply(q, k, v, attn_mask, is_causal, options.get("scale"))


torch_attention = torch.nn.functional.scaled_dot_product_attention


def fill_torch() -> None:
    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_bf16_supported = lambda including_emulation=True: including_emulation  # as a T4: auto is float16
    cuda.device_count = lambda: 1
    cuda.current_device = cuda.max_memory_allocated = cuda.memory_reserved = lambda *_: 0
    cuda.mem_get_info = lambda *_: (80 << 30, 80 << 30)
    cuda.get_device_name = lambda *_: "a device that is not there"
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_device = cuda.set_rng_state = cuda.empty_cache = cuda.manual_seed_all = lambda *_: None
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.nn.Module._apply = apply_to
    torch.nn.functional.rms_norm = norm
    torch.Tensor.pin_memory = pinned
    _foreach_utils._foreach_supported_types.append(Fake)
    _device_constructors()  # stored at the first call: `with torch.device("meta")` must know the functions of torch
    for name in ("tensor", "ones", "zeros", "empty", "full", "arange", "linspace", "eye", "scalar_tensor"):
        setattr(torch, name, functools.partial(factory, getattr(torch, name)))


# ---- what rlhf-kl and the libraries below it do with a tensor's storage, which a Fake does not have


def store_frozen(model: Any, dtype: torch.dtype) -> None:
    from transformers.pytorch_utils import Conv1D

    whole = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in whole.base_model.modules():
        own = {name: x for name, x in layer._parameters.items() if x is not None}
        if isinstance(layer, torch.nn.Linear | Conv1D) and not any(x.requires_grad for x in own.values()):
            layer._parameters |= {name: torch.nn.Parameter(x.detach().to(dtype), False) for name, x in own.items()}


def save_model(usual: Any, model: Any, tokenizer: Any, folder: Path, tensors: dict[str, Any] | None = None) -> None:
    usual(model, tokenizer, folder, {name: cpu(x) for name, x in (tensors or model.state_dict()).items()})


def fill_program() -> None:
    """Before the modules that import these functions are imported themselves."""
    from rlhf_kl.models import lm, pretrained, value

    value.store_frozen = store_frozen
    pretrained.save_model = functools.partial(save_model, pretrained.save_model)
    step, decode = lm.Trunk.step, lm.decode
    inside = False

    def counted_step(self: Any, ids: Any, *rest: Any) -> Any:
        if inside and ids.shape[1] == 1:
            counts.step()
        return step(self, ids, *rest)

    def counted_decode(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        inside, counts.open = True, None
        try:
            return decode(*args, **kwargs)
        finally:
            inside = False

    lm.Trunk.step, lm.decode = counted_step, counted_decode
    mark_phases(lambda: counts)


def returned_mib() -> float:
    """Of 256 MiB on the CPU, the part that goes back to the system when their tensors are freed.

    Pieces of 64 MiB: smaller ones glibc may keep by itself.
    """
    import psutil

    pieces = [torch.ones(1 << 24) for _ in range(4)]
    before = psutil.Process().memory_info().rss
    del pieces
    return (before - psutil.Process().memory_info().rss) / (1 << 20)


def run(words: list[str]) -> dict[str, Any]:
    """Exit code, output and counts of one command."""
    from rlhf_kl import cli

    global counts
    counts, out = Counts(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), Mode():
        try:
            code = cli.run(words)
        except Exception:
            traceback.print_exc(file=out)
            code = -1
    return {"code": code, "output": out.getvalue(), **vars(counts)}


def main() -> None:
    fill_torch()
    fill_program()
    outcomes = [run(words) for words in json.loads(Path(sys.argv[2]).read_text())]
    Path(sys.argv[3]).write_text(json.dumps({"commands": outcomes, "returned_mib": returned_mib()}))


if __name__ == "__main__":
    main()
