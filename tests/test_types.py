from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhf_kl.types import RolloutBatch

PROMPTS, RESPONSES = (2, 4, 1), (3, 1, 2)  # lengths


def batch() -> RolloutBatch:
    """Three rows with prompts of 5 columns and responses of 4; no row fills either."""
    noise = torch.Generator().manual_seed(0)
    prompt_mask = torch.arange(5) >= 5 - torch.tensor(PROMPTS).unsqueeze(1)
    mask = torch.arange(4) < torch.tensor(RESPONSES).unsqueeze(1)
    per_token = {
        name: torch.randn(3, 4, generator=noise) * mask
        for name in ("logprobs", "ref_logprobs", "exact_kl", "entropy", "k1_variance", "logprob_variance", "values")
    }
    return RolloutBatch(
        prompt_ids=torch.randint(3, 7, (3, 5), generator=noise) * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=torch.randint(3, 7, (3, 4), generator=noise) * mask,
        mask=mask,
        scores={"reward": torch.arange(3.0)},
        shaped_scores=torch.arange(3.0) / 2,
        ended=torch.tensor([True, False, True]),
        prompts=["p"] * 3,
        responses=["r"] * 3,
        **per_token,
    )


def test_nothing_is_mutated() -> None:
    with pytest.raises(FrozenInstanceError):
        batch().scores = torch.zeros(3)  # type: ignore[misc]


def test_the_layout_is_that_of_its_rows() -> None:
    whole = batch()
    packed = whole.layout.pack([2, 0])
    for row, ids in zip((2, 0), packed.ids, strict=True):
        mask = torch.cat([whole.prompt_mask[row], whole.mask[row]])
        read = whole.input_ids[row, mask][:-1]  # the last token is never read
        assert ids[: len(read)].tolist() == read.tolist()
    assert (
        whole.response_ids.flatten()[packed.places].tolist() == whole.response_ids[[2, 0]][whole.mask[[2, 0]]].tolist()
    )


def uneven(width: int, tokens: int, start: int) -> RolloutBatch:
    """Two rows; the first has a prompt of one token and a response of one."""
    prompt_mask = torch.ones(2, width, dtype=torch.bool)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    prompt_mask[0, :-1], mask[0, 1:] = False, False
    figures = torch.arange(2 * tokens, dtype=torch.float32).view(2, tokens) + start
    return RolloutBatch(
        prompt_ids=torch.full((2, width), start),
        prompt_mask=prompt_mask,
        response_ids=torch.full((2, tokens), start),
        mask=mask,
        **dict.fromkeys(
            ("logprobs", "ref_logprobs", "exact_kl", "entropy", "k1_variance", "logprob_variance", "values"), figures
        ),
        scores={"reward": torch.tensor([1.0, 2.0 if start else math.nan]) + start},
        shaped_scores=torch.tensor([1.0, 2.0]) + start,
        ended=torch.tensor([True, False]),
        prompts=["a", "b"],
        responses=["c", "d"],
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
