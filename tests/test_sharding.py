"""Weights of a module by name; spread ones are tested in tests/processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_kl.errors import InputError
from rlhf_kl.sharding import held_share, load_tensors, tensors_of, unsharded


class Tied(nn.Module):
    """A head that is the embedding, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_tied_tensors_are_held_once() -> None:
    assert sorted(tensors_of(Tied())) == ["embedding.weight", "scale"]
    assert tensors_of(Tied(), keep=False) == {}


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_tied_tensors_are_found_under_any_name(name: str) -> None:
    module = Tied()
    load_tensors(module, {name: torch.full((3, 2), 7.0), "scale": torch.tensor([2.0]), "more": torch.zeros(1)})
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.unique().tolist() == [7.0]
    assert module.scale.item() == 2.0


@pytest.mark.parametrize(
    "tensors", [{"scale": torch.tensor([2.0])}, {"head.weight": torch.ones(1), "scale": torch.tensor([2.0])}]
)
def test_what_does_not_fit_changes_nothing(tensors: dict[str, torch.Tensor]) -> None:
    module = Tied()
    with pytest.raises(InputError, match=r"missing or of another shape: embedding\.weight"):
        load_tensors(module, {"scale": torch.tensor([2.0]), **tensors})
    assert module.scale.item() == 1.0


def test_one_process_holds_everything() -> None:
    module = Tied()
    assert held_share(module.parameters()) == 1.0
    with unsharded(module):  # nothing to gather
        assert module.embedding.weight.shape == (3, 2)
