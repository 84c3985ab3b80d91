from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_kl.ops.prefixes import find_prefixes

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids = torch.tensor([row + [9] * (length - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])


def test_by_hand() -> None:
    found = find_prefixes(*padded([[1, 2, 5], [1, 2], [1, 3]]))
    assert found.shape == (3, 3)
    assert found.ids.tolist() == [1, 2, 5, 3]
    assert found.positions.tolist() == [0, 1, 2, 1]
    assert found.repeated == 3 / 7
    # The row that is all beginning comes first.
    assert found.grid.places.tolist() == [3, 4, 2, 7]
    assert found.grid.number.tolist() == [0, 1, 2, 0, 1, 0, 0, 3, 0]
    assert found.grid.repeats.tolist() == [0, 1, 6]
    assert found.common == 1
    assert found.own.places.tolist() == [2, 1, 5 - 1]
    assert found.own.number.tolist() == [0, 1, 0, 0, 2, 0]
    assert found.own.repeats.tolist() == [0]


@given(ROWS)
def test_each_beginning_stands_once_and_every_token_finds_its_own(rows: list[list[int]]) -> None:
    ids, mask = padded(rows)
    found = find_prefixes(ids, mask)
    length = ids.shape[1]

    def beginning(place: int, start: int = 0) -> tuple[int, ...]:
        row, column = divmod(place, length - start)
        return tuple(rows[row][: start + column + 1])

    stand = [beginning(place) for place in found.grid.places.tolist()]
    assert len(set(stand)) == len(stand)
    assert set(stand) == {tuple(row[: k + 1]) for row in rows for k in range(len(row))}
    assert found.ids.tolist() == [one[-1] for one in stand]
    assert found.positions.tolist() == [len(one) - 1 for one in stand]
    alike = [k for k in range(1, min(map(len, rows)) + 1) if len({tuple(row[:k]) for row in rows}) == 1]
    assert found.common == max(alike, default=0)
    assert stand[: found.common] == [tuple(rows[0][: k + 1]) for k in range(found.common)]
    for grid, start in ((found.grid, 0), (found.own, found.common)):
        places = grid.places.tolist()
        assert [beginning(place, start) for place in places] == stand[start:]
        real = mask[:, start:].flatten().nonzero().squeeze(1).tolist()
        for place in real:
            assert stand[start + int(grid.number[place])] == beginning(place, start)
        assert sorted(places + grid.repeats.tolist()) == real
    for number, one in enumerate(stand):  # behind all that it looks at
        assert len(one) == 1 or stand.index(one[:-1]) < number
