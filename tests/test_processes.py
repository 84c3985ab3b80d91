from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_kl import processes
from rlhf_kl.processes import Group, Processes


def test_one_process_has_all_rows_and_writes() -> None:
    alone = Processes()
    assert (alone.count, alone.index, alone.writes) == (1, 0, True)
    assert list(range(12))[alone.rows(12)] == list(range(12))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for reduce in (alone.sum, alone.max):
        assert torch.equal(reduce(x), x)
    assert alone.all("x") == ["x"]
    assert alone.first("x") == alone.together(lambda: "x") == alone.first_before_others(lambda: "x") == "x"
    assert alone.agree("x") == "x"
    assert alone.agree(None) is None


def test_several_share_the_rows_without_gap_or_overlap_and_one_writes() -> None:
    group = [Processes(count=3, index=i) for i in range(3)]
    shares = [list(range(12))[process.rows(12)] for process in group]
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    uneven = [list(range(7))[process.rows(7)] for process in group]
    assert [row for share in uneven for row in share] == list(range(7))
    assert {len(share) for share in uneven} == {2, 3}
    assert [process.writes for process in group] == [True, False, False]


def test_gradients_travel_in_buckets_and_frozen_weights_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that have the same gradients; the all-reduce is stood in for."""
    travelled: list[int] = []

    def doubled(tensor: torch.Tensor) -> None:
        travelled.append(tensor.numel())
        tensor.mul_(2.0)

    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(processes.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(processes.dist, "all_reduce", doubled)
    monkeypatch.setattr(processes, "BUCKET", 8)
    frozen = nn.Parameter(torch.ones(1000), requires_grad=False)
    learned, more, unused = (nn.Parameter(torch.ones(size)) for size in (5, 3, 4))
    learned.grad, more.grad = torch.full((5,), 3.0), torch.full((3,), 0.5)
    assert Group(None).sum_gradients([frozen, learned, more, unused], figure=1.5) == 3.0
    assert torch.equal(learned.grad, torch.full((5,), 6.0))
    assert torch.equal(more.grad, torch.ones(3))
    assert unused.grad is None
    assert frozen.grad is None
    assert travelled == [8, 8]  # 5 + 3; 4, three flags and the figure
