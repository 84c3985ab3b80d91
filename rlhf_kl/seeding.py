"""Seeds for every source of randomness, made from the run's seed and what the numbers are for.

Nothing draws from a shared stream: the numbers of step 17 are the same whether or not steps 1 to 16 ran in
this process, and the same on any number of processes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on all of its arguments and nothing else."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def uniforms(rows: int, columns: int, seed: int, *purpose: str | int) -> Tensor:
    """(rows, columns) numbers in [0, 1): the sampling noise of a global batch, of which a process takes its rows."""
    return torch.rand(rows, columns, generator=generator(seed, *purpose), dtype=torch.float64)


def shuffled(size: int, seed: int, *purpose: str | int) -> Tensor:
    """A permutation (size,) of range(size)."""
    return torch.randperm(size, generator=generator(seed, *purpose))


# ---- the libraries' own generators: nothing here draws from them, but a reward function or a model may ----


def seed_libraries(seed: int) -> None:
    """Seed python, numpy and torch (all devices) for code that draws from their global generators."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


def library_state() -> dict[str, Any]:
    """State of the global generators of python, numpy and torch (all devices), JSON-able."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _packed(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = [_packed(device) for device in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["mps"] = _packed(torch.mps.get_rng_state())
    return state


def load_library_state(state: dict[str, Any]) -> None:
    """Takes over a `library_state`; devices that are not here are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_unpacked(state["torch"]))
    for index, packed in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_unpacked(packed), index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_unpacked(state["mps"]))


@contextlib.contextmanager
def library_state_kept() -> Iterator[None]:
    """What runs inside (an evaluation) draws numbers that the run does not miss afterwards."""
    state = library_state()
    try:
        yield
    finally:
        load_library_state(state)


def _packed(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _unpacked(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
