"""Memory: what a training pass keeps, and full memory on each device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_kl.errors import MemoryFull

if TYPE_CHECKING:
    import torch

# torch raises plain RuntimeErrors on a CPU and from libraries of the GPU.
_WORDS = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED", "Storage size calculation overflowed")

# Numbers that one layer keeps for a token, in hidden sizes: inputs and outputs of attention and the feed-forward
# part with its inner width of four, and the two norms.
KEPT_PER_LAYER = 18
# Bytes that one pass may keep if the number of rows is not set; more if the weights take more.
ROOM = {"cpu": 96 << 20, "cuda": 8 << 30}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def memory_is_full(error: BaseException) -> bool:
    """Whether an error means that the memory of a device is full. Does not import torch."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free: fresh pages for each large tensor take longer than what is computed in them."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_TRIM_THRESHOLD, -1)
        library.mallopt(M_MMAP_MAX, 0)


@contextlib.contextmanager
def memory_for(work: str, change: str) -> Iterator[None]:
    """Errors: MemoryFull, with the advice `change`, if `work` does not fit. Decorates a function too."""
    try:
        yield
    except Exception as error:
        if not memory_is_full(error):
            raise
        raise MemoryFull(f"memory is full: {work}", change) from error


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; of a CPU's, this process's part."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]

    import psutil

    return int(psutil.virtual_memory().available) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def all_memory(device: torch.device, processes: int) -> int:
    """Bytes of a device like this one for each process; of a CPU's, a part for each."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[1]

    import psutil

    return int(psutil.virtual_memory().total) // processes


def kept_per_token(model: Any) -> int:
    """Numbers that a pass with gradients keeps per token, without logits; correct to about a third."""
    shape = model.config.get_text_config()
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return (layers + KEPT_PER_LAYER) * hidden  # the inputs of all layers, and the layer that is recomputed
    return layers * hidden * KEPT_PER_LAYER


def tokens_of_a_pass(model: Any, device: torch.device, dtype: str, *, models: int = 1) -> int:
    """Tokens that one training pass has room for; at least 1.

    `models` of this size take part: two if the value function has its own model. Weights, gradients and Adam's moments
    take four times the weights, which are float32; activations of the same size as the weights add little. Frozen
    weights are in the type of the pass. In 16 bits about half of what is kept is float32: the states between layers.
    """
    size, kept = (4, 4) if dtype == "float32" else (2, 3)  # bytes of a frozen number, and of one that is kept
    weights = int(sum(p.numel() * (4 if p.requires_grad else size) for p in model.parameters()))
    room = max(ROOM.get(device.type, ROOM["cpu"]), models * weights)
    return max(1, room // (models * kept_per_token(model) * kept))


# ---- what needs less

LESS_MEMORY = {  # by kind of run
    "train": "lower rollout.batch_size, rollout.max_new_tokens or ppo.microbatch_size",
    "sft": "lower sft.microbatch_size, or use shorter texts",
    "reward-model": "lower reward_model.microbatch_size, or use shorter texts",
}
SMALLER_ROLLOUT = "lower rollout.batch_size or rollout.max_new_tokens"


def smaller_pass(section: str) -> str:
    """Advice where a training pass does not fit. `section`: of the config, which has its microbatch_size."""
    others = "policy.gradient_checkpointing=true or an adapter (policy.lora={})"
    return f"lower {section}.microbatch_size, or use {others}"
