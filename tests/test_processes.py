from __future__ import annotations

import torch

from rlhf_kl.processes import Processes


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
