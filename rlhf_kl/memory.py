"""Memory: what a training pass keeps; full memory, detected on each device; batches and passes halved to fit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_kl.errors import MemoryFull

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

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


def free_cached_memory() -> None:
    """Free the cache of the GPU's allocator; call it outside of the handler, which holds the failed tensors."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_for(work: str, change: str) -> Iterator[None]:
    """Errors: MemoryFull, with the advice `change`, if `work` does not fit. Decorates a function too."""
    try:
        yield
    except Exception as error:
        if not memory_is_full(error):
            raise
        raise MemoryFull(f"memory is full: {work}", change) from error


def kept_per_token(model: Any) -> int:
    """Numbers that a pass with gradients keeps per token, without logits; correct to about a third."""
    shape = model.config.get_text_config()
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return (layers + KEPT_PER_LAYER) * hidden  # the inputs of all layers, and the layer that is recomputed
    return layers * hidden * KEPT_PER_LAYER


def tokens_of_a_pass(model: Any, device: torch.device, dtype: str, *, models: int = 1) -> int:
    """Tokens that one training pass has room for, with float32 weights; at least 1.

    `models` of this size take part: two if the value function has its own model. Weights, gradients and Adam's moments
    take four times the weights; activations of the same size as the weights add little.
    """
    weights = int(sum(parameter.numel() for parameter in model.parameters()))
    room = max(ROOM.get(device.type, ROOM["cpu"]), 4 * models * weights)
    return max(1, room // (models * kept_per_token(model) * (2 if dtype == "bfloat16" else 4)))


SMALLER_PASS = "shorter rows, an adapter (policy.lora={}) or policy.gradient_checkpointing=true need less"


class PassSize:
    """Rows in one pass: halved, for the rest of the run, if they do not fit into memory."""

    def __init__(self, rows: int, work: str = "a training pass", change: str = SMALLER_PASS) -> None:
        """`work` and `change`: what does not fit, and advice, for the error."""
        self.rows, self.work, self.change = rows, work, change
        self.halved: int | None = None  # rows after halving; None = never halved
        self.largest: int | None = None  # rows in the largest pass of the attempt, if it reports them

    def tries(self, rows: int) -> None:
        """A pass of the attempt has `rows` rows."""
        self.largest = max(rows, self.largest or 0)

    def halve_to(self, rows: int | None) -> None:
        """Take over the `halved` of an earlier part of the run."""
        if rows is not None and rows < self.rows:
            self.rows = self.halved = rows

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"halved": self.halved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.halve_to(state["halved"])

    def fit(self, attempt: Callable[[int], Result], undo: Callable[[], None] = lambda: None) -> Result:
        """`attempt(rows)`, again with half the rows after `undo()` as long as memory is full.

        Errors: MemoryFull where a single row does not fit.
        """
        while True:
            self.largest = None
            try:
                return attempt(self.rows)
            except Exception as error:
                if not memory_is_full(error):
                    raise
                tried = min(self.rows, self.largest or self.rows)
                if tried == 1:
                    raise MemoryFull(f"memory is full: {self.work} of one row does not fit", self.change) from error
            # Out of the handler, which holds the failed pass's tensors.
            undo()
            free_cached_memory()
            self.halve_to(tried // 2)


def fitting_batches(total: int, rows: int, work: Callable[[int, int], Result], change: str) -> Iterator[Result]:
    """`work(start, stop)` for independent rows 0 to `total`, `rows` at a time. Errors: as of `PassSize.fit`."""
    size, start = PassSize(rows, "a batch", change), 0

    def attempt(count: int) -> tuple[int, Result]:
        stop = min(start + count, total)
        size.tries(stop - start)
        return stop, work(start, stop)

    while start < total:
        start, result = size.fit(attempt)
        yield result
