from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhf_kl.types import RolloutBatch
from tests.made import rollout


def test_nothing_is_mutated() -> None:
    with pytest.raises(FrozenInstanceError):
        rollout(torch.ones(1, 1, dtype=torch.bool)).scores = {}  # type: ignore[misc]


def uneven(width: int, tokens: int, start: int) -> RolloutBatch:
    """Two rows; the first has a prompt of one token and a response of one."""
    prompt_mask = torch.ones(2, width, dtype=torch.bool)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    prompt_mask[0, :-1], mask[0, 1:] = False, False
    return rollout(
        mask,
        prompt_ids=torch.full((2, width), start),
        prompt_mask=prompt_mask,
        response_ids=torch.full((2, tokens), start),
        logprobs=torch.arange(2 * tokens, dtype=torch.float32).view(2, tokens) + start,
        scores={"reward": torch.tensor([1.0, 2.0 if start else math.nan]) + start},
        shaped_scores=torch.tensor([1.0, 2.0]) + start,
        rows=[{"answer": start}, {"answer": start + 1}],
        penalties={"two": torch.tensor([0.0, 1.0])},
    )


def test_batches_of_other_widths_below_each_other() -> None:
    small, large = uneven(2, 3, 0), uneven(4, 5, 10)
    whole = RolloutBatch.concat([small, large])
    assert whole.prompt_mask.tolist()[:2] == [[False, False, False, True], [False, False, True, True]]
    assert whole.mask.sum(1).tolist() == [1, 3, 1, 5]
    assert whole.logprobs[1].tolist() == [3.0, 4.0, 5.0, 0.0, 0.0]
    assert whole.logprobs[2:].equal(large.logprobs)
    assert whole.scores["reward"][[0, 2, 3]].tolist() == [1.0, 11.0, 12.0]
    assert whole.scored.tolist() == [True, False, True, True]
    assert [row["answer"] for row in whole.rows] == [0, 1, 10, 11]
    # Each row's tokens lie where they lay: the last token of a prompt is its last column.
    assert whole.input_ids[0, 3] == 0
    assert whole.input_ids[2, 3] == 10
