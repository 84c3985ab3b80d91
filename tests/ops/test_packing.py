from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_kl.ops.packing import (
    KEYS_AND_VALUES,
    LEAST_SPARED,
    Layout,
    group_lengths,
    pack_last,
    split_groups,
    text_layout,
)
from tests import made

PROMPTS = [[11, 12], [21, 22, 23], [31]]
RESPONSES = [[13, 14, 15], [24], [32, 33]]


def layout() -> Layout:
    ids = torch.zeros(3, 7, dtype=torch.long)  # prompts of up to 3 columns, responses of up to 4
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids[row, 3 - len(prompt) : 3 + len(response)] = torch.tensor(prompt + response)
    return Layout(ids, 3, torch.tensor([2, 3, 1]), torch.tensor([3, 1, 2]))


def test_a_pass_by_hand() -> None:
    whole = layout()
    packed = whole.pack([2, 0])
    assert whole.tokens == 6
    assert whole.response_ids.flatten()[packed.places].tolist() == [32, 33, 13, 14, 15]
    assert packed.ids.shape == (2, 4)
    assert packed.ids[0, :2].tolist() == [31, 32]
    assert packed.ids[1].tolist() == [11, 12, 13, 14]
    assert packed.states.tolist() == [0, 1, 4 + 1, 4 + 2, 4 + 3]
    assert packed.places.tolist() == [2 * 4, 2 * 4 + 1, 0, 1, 2]
    assert packed.numbers.tolist() == [4, 5, 0, 1, 2]


def test_a_row_without_a_response_has_no_state() -> None:
    whole = Layout(torch.ones(2, 5, dtype=torch.long), 3, torch.tensor([3, 1]), torch.tensor([0, 2]))
    packed = whole.pack([0, 1])
    assert packed.ids.shape == (2, 2)
    assert packed.states.tolist() == [2, 3]
    assert packed.numbers.tolist() == [0, 1]


CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=9), min_size=1, max_size=6)


@given(TEXTS, st.data())
def test_texts_are_scored_from_their_starts_on(rows: list[list[int]], data: st.DataObject) -> None:
    """In whatever passes: beside each scored token stands the state that has read all of its text before it."""
    starts = [data.draw(st.integers(1, len(row) - 1)) for row in rows]
    whole = text_layout(rows, starts, CPU)
    scored = {}
    for packed in whole.passes(range(len(rows)), most_rows=2, most_tokens=20, share=False):
        length = packed.ids.shape[1]
        for state, place, number in zip(*(x.tolist() for x in packed[1:4]), strict=True):
            row, column = divmod(state, length)
            assert number not in scored
            scored[number] = (packed.ids[row, : column + 1].tolist(), int(whole.response_ids.flatten()[place]))
    expected = [(row[:i], row[i]) for row, start in zip(rows, starts, strict=True) for i in range(start, len(row))]
    assert [scored[number] for number in range(whole.tokens)] == expected


@given(TEXTS)
def test_the_last_token_of_each_text_is_read(rows: list[list[int]]) -> None:
    packed = pack_last(rows, CPU)
    for i, (row, state) in enumerate(zip(rows, packed.states.tolist(), strict=True)):
        assert divmod(state, packed.ids.shape[1]) == (i, len(row) - 1)
        assert packed.ids[i, : len(row)].tolist() == row


Row = tuple[int, tuple[int, int]]  # the length of a response; number and length of its prompt


def tokens_of(group: Sequence[Row]) -> int:
    """Padded tokens of responses, and of their different prompts."""
    prompts = {prompt for _, prompt in group}
    return len(group) * max(n for n, _ in group) + len(prompts) * max(width for _, width in prompts)


def cheapest(rows: list[Row], allowed: Callable[[Sequence[Row]], bool], overhead: int) -> int:
    """By trying every way to cut the sorted rows."""
    ordered, best = sorted(rows), 1 << 60
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            groups = [ordered[a:b] for a, b in zip((0, *cuts), (*cuts, len(ordered)), strict=True)]
            if all(map(allowed, groups)):
                best = min(best, sum(tokens_of(g) + overhead for g in groups))
    return best


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([(0, 3), (1, 20), (2, 9)])), min_size=1, max_size=8),
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 120),
    st.integers(0, 50),
)
def test_groups_are_the_cheapest_there_are(rows: list[Row], shared: bool, most: int, tokens: int, cost: int) -> None:
    """Of responses behind their prompts, which each group reads once, and of whole texts."""
    rows = rows if shared else [(length, (0, 0)) for length, _ in rows]
    lengths, prompts = [n for n, _ in rows], [prompt for _, prompt in rows] if shared else None
    found = group_lengths(lengths, most_rows=most, most_tokens=tokens, overhead=cost, prompts=prompts)
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))

    def allowed(group: Sequence[Row]) -> bool:
        copies = len(group) * (max(width for _, (_, width) in group) // KEYS_AND_VALUES)
        return len(group) <= most and (len(group) == 1 or tokens_of(group) + copies <= tokens)

    groups = [[rows[i] for i in group] for group in found]
    assert all(map(allowed, groups))
    assert sum(tokens_of(group) + cost for group in groups) == cheapest(rows, allowed, cost)


@pytest.mark.parametrize(("overhead", "count"), [(0, 3), (1000, 1)])
def test_a_dear_pass_is_worth_more_padding(overhead: int, count: int) -> None:
    assert len(group_lengths([3, 9, 27], most_rows=9, most_tokens=1000, overhead=overhead)) == count


def test_groups_are_halved_until_there_are_enough() -> None:
    assert split_groups([[1], [2, 3, 4]], 2) == [[1], [2, 3, 4]]
    split = split_groups([[1], [2, 3, 4]], 4)
    assert sorted(split) == [[1], [2], [3], [4]]


def test_prompts_are_shared_only_where_that_spares_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made.two_prompts()
    assert all(rows.prompts is None for rows in batch.passes(range(6), most_rows=9, most_tokens=99, share=False))
    assert all(rows.prompts is None for rows in batch.passes([0, 2], most_rows=9, most_tokens=99))  # two prompts
    (shared,) = batch.passes([0, 1, 5], most_rows=9, most_tokens=99)
    assert shared.prompts is not None
    assert shared.prompts.ids.shape == (1, 9)
    assert shared.ids.shape == (3, 4)
    monkeypatch.setitem(LEAST_SPARED, "cpu", 18)  # two prompts of nine tokens are not more
    assert all(rows.prompts is None for rows in batch.passes([0, 1, 5], most_rows=9, most_tokens=99))


def test_a_shared_pass_keeps_to_its_limits() -> None:
    passes = list(made.two_prompts().passes(range(6), most_rows=2, most_tokens=99))
    assert [len(rows.ids) for rows in passes] == [2, 2, 2]
    assert sorted(int(n) for rows in passes for n in rows.numbers) == list(range(sum(made.RESPONSES)))
    assert len(list(made.two_prompts().passes(range(6), most_rows=9, most_tokens=1))) == 6
