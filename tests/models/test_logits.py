"""Logits exist a bounded chunk at a time, in every pass there is, and no result depends on its size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_kl.models import logits as module
from rlhf_kl.models.logits import Logits


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (99, [4])])
def test_chunks_come_in_order_and_are_joined(monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 5 * rows + 4)
    hidden = torch.arange(8.0).view(4, 2)
    logits = Logits(lambda x: x.sum(1, keepdim=True) + torch.arange(5), hidden, 5)
    seen = []

    def read(x: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return x[:, 0], hidden[at, 1]

    sums, seconds = logits.map(read)
    assert sums.tolist() == [1.0, 5.0, 9.0, 13.0]
    assert seconds.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert seen == sizes
    assert logits(slice(1, 3)).tolist() == [[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]


def test_no_state_gives_no_result() -> None:
    (nothing,) = Logits(lambda x: x, torch.zeros(0, 5), 5).map(lambda x, _: (x.sum(1),))
    assert nothing.shape == (0,)
