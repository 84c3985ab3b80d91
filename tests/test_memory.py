from __future__ import annotations

import errno
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_kl import memory
from rlhf_kl.errors import MemoryFull
from rlhf_kl.events import UpdateSkipped
from rlhf_kl.memory import kept_per_token, memory_for, memory_is_full, tokens_of_a_pass
from rlhf_kl.models.lm import enable_recompute, recomputing
from rlhf_kl.models.scratch import new_gpt2
from rlhf_kl.ppo.rollout import unusable
from tests.made import rollout


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(1 << 60),
        lambda: torch.empty(1 << 62),  # beyond what can be counted
        lambda: bytearray(1 << 60),
        lambda: np.empty(1 << 58, dtype=np.uint8),
    ],
)
def test_what_is_raised_here_where_memory_is_full(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert memory_is_full(caught.value)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("shape"), False),
        (ValueError("out of memory"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (MemoryFull("a", "b"), False),
    ],
)
def test_what_is_raised_elsewhere(error: Exception, full: bool) -> None:
    assert memory_is_full(error) == full
    with pytest.raises(MemoryFull if full else type(error)) as caught, memory_for("a pass", "smaller"):
        raise error
    assert ("a pass: smaller" in str(caught.value)) == full


ROWS, LENGTH = 4, 32


@pytest.fixture
def model(letters: Any) -> Any:
    return new_gpt2(vocab_size=7, hidden_size=64, layers=6, heads=2, context=64, tokenizer=letters, seed=0)


def kept_by(model: Any) -> int:
    """Numbers that autograd keeps for a token."""
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), recomputing(model):
        hidden = model.transformer(torch.zeros(ROWS, LENGTH, dtype=torch.long), use_cache=False).last_hidden_state
    hidden.sum()
    return sum(kept.values()) // (ROWS * LENGTH)


def test_the_count_is_what_autograd_keeps(model: Any) -> None:
    assert kept_per_token(model) == pytest.approx(kept_by(model), rel=1 / 3)


def test_layers_that_are_computed_again_keep_their_input_alone(model: Any) -> None:
    whole = kept_per_token(model)
    enable_recompute(model)
    between = kept_by(model)  # forward alone: without the layer that the backward pass computes again
    assert between == pytest.approx(kept_per_token(model) - memory.KEPT_PER_LAYER * 64, rel=1 / 3)
    assert kept_per_token(model) < whole / 4


def test_a_pass_has_the_tokens_that_fit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens' room; or the weights, where these are larger."""
    each = 4 * kept_per_token(model)
    monkeypatch.setattr(memory, "ROOM", {"cpu": 12 * each, "cuda": 24 * each})
    monkeypatch.setattr(model, "parameters", list)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert tokens_of_a_pass(model, cpu, "float32") == 12
    assert tokens_of_a_pass(model, cpu, "bfloat16") == tokens_of_a_pass(model, cpu, "float16") == 16
    assert tokens_of_a_pass(model, gpu, "bfloat16") == 32
    assert tokens_of_a_pass(model, cpu, "float32", models=2) == 6
    weights = torch.zeros(5 * each)
    monkeypatch.setattr(model, "parameters", lambda: [weights])
    assert tokens_of_a_pass(model, cpu, "float32") == tokens_of_a_pass(model, cpu, "float32", models=2) == 20
    assert tokens_of_a_pass(model, cpu, "bfloat16") == 16  # frozen: half of it, so the room is larger
    weights.requires_grad_()
    assert tokens_of_a_pass(model, cpu, "bfloat16") == 26


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("logprobs", "log-prob of the policy"),
        ("ref_logprobs", "log-prob of the reference"),
        ("exact_kl", "KL"),
        ("values", "value"),
        ("shaped_scores", "score"),
    ],
)
def test_one_number_spoils_a_rollout(field: str, said: str, value: float) -> None:
    clean = rollout(torch.ones(2, 3, dtype=torch.bool))
    assert unusable(clean) is None
    spoilt = getattr(clean, field).clone()
    spoilt[(1,) * spoilt.dim()] = value
    found = unusable(replace(clean, **{field: spoilt}))
    assert found is not None
    assert said in found.reason
    beyond = {"reward": torch.tensor([0.0, torch.inf])}  # a clip may hide it in the shaped scores
    assert unusable(replace(clean, scores=beyond)) == UpdateSkipped("a score was not finite")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is that of glibc")
def test_memory_that_was_freed_is_used_again_without_fresh_pages() -> None:
    """In a process of its own, with tensors that are too large for the usual heap (32 MiB)."""
    code = """
import resource, torch
from rlhf_kl.memory import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def of_ten():
    for count in (12, 5):  # the first ones leave gaps, which the others fill
        before = faults()
        for _ in range(count):
            torch.ones(9 << 20)
    return faults() - before
usual = of_ten()
keep_freed_memory()
print(usual, of_ten())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < usual / 8
