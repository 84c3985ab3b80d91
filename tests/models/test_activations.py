from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl import memory as activations
from rlhf_kl.memory import kept_per_token, tokens_of_a_pass
from rlhf_kl.models.lm import enable_recompute, recomputing
from rlhf_kl.models.scratch import new_gpt2

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
    enable_recompute(model, "policy.gradient_checkpointing")
    between = kept_by(model)  # forward alone: without the layer that the backward pass computes again
    assert between == pytest.approx(kept_per_token(model) - activations.KEPT_PER_LAYER * 64, rel=1 / 3)
    assert kept_per_token(model) < whole / 4


def test_a_pass_has_the_tokens_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "ROOM", {"cpu": 4000, "cuda": 8000})
    monkeypatch.setattr(activations, "kept_per_token", lambda kept_and_weights: kept_and_weights[0])
    monkeypatch.setattr(activations, "parameter_count", lambda kept_and_weights: kept_and_weights[1])
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert tokens_of_a_pass((100, 0), cpu, "float32") == 10
    assert tokens_of_a_pass((100, 0), cpu, "bfloat16") == 20
    assert tokens_of_a_pass((100, 0), gpu, "bfloat16") == 40
    assert tokens_of_a_pass((100, 2000), cpu, "float32") == 20
    assert tokens_of_a_pass((100, 0), cpu, "float32", models=2) == 5
    assert tokens_of_a_pass((50, 1000), cpu, "float32", models=2) == 20
    assert tokens_of_a_pass((10**6, 2000), cpu, "float32") == 1
