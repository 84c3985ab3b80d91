from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.data.prompts import PromptStream, check_prompts
from rlhf_kl.errors import InputError

TEXTS = ["a", "ab", "abc", "abcd", "b", "bb", "bbb"]


def stream(letters: Any, batch_size: int = 3, seed: int = 0) -> PromptStream:
    return PromptStream(TEXTS, letters, batch_size, seed)


def test_every_prompt_comes_once_before_any_comes_again(letters: Any) -> None:
    prompts = stream(letters)
    seen = [text for step in range(1, 8) for text in prompts.batch(step).texts]
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == sorted(TEXTS)
    assert seen[:7] != seen[7:14]


def test_a_batch_depends_on_seed_and_step_alone(letters: Any) -> None:
    forward = [stream(letters).batch(step).texts for step in (1, 2, 5)]
    one = stream(letters)
    assert [one.batch(step).texts for step in (5, 2, 1)] == forward[::-1]
    assert stream(letters, seed=1).batch(1).texts + stream(letters, seed=1).batch(2).texts != (forward[0] + forward[1])


def test_processes_take_their_rows_of_the_global_batch(letters: Any) -> None:
    prompts = stream(letters, batch_size=4)
    whole = prompts.batch(2)
    halves = [prompts.batch(2, offset, 2).texts for offset in (0, 2)]
    assert halves[0] + halves[1] == whole.texts


def test_prompts_are_padded_on_the_left(letters: Any) -> None:
    batch = stream(letters).pick([0, 3])
    assert batch.ids.tolist() == [[0, 0, 0, 1, 3], [1, 3, 4, 5, 6]]
    assert batch.mask.tolist() == [[False, False, False, True, True], [True] * 5]
    assert len(batch) == 2


def problem(texts: list[str], room: int | None) -> str:
    with pytest.raises(InputError) as caught:
        check_prompts(texts, [[1] * (len(text) + 1) for text in texts], room, "data.prompts")
    return str(caught.value)


def test_prompts_that_cannot_be_answered_are_refused() -> None:
    assert problem(["ab", "", " \n"], None) == "data.prompts: 2 of 3 prompts are empty, the first in row 2"
    long = problem(["ab", "abcd", "abcde"], 4)
    assert "2 of 3" in long
    assert "row 2 has 5 tokens" in long
    assert "leaves 4" in long
    assert "rollout.max_new_tokens" in problem(["ab"], 0)
    check_prompts(["ab", "abc"], [[1, 2, 3], [1, 2, 3, 4]], 4, "data.prompts")
