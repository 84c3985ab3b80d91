from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

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
        for name in ("logprobs", "ref_logprobs", "exact_kl", "entropy", "values")
    }
    return RolloutBatch(
        prompt_ids=torch.randint(3, 7, (3, 5), generator=noise) * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=torch.randint(3, 7, (3, 4), generator=noise) * mask,
        mask=mask,
        scores=torch.arange(3.0),
        shaped_scores=torch.arange(3.0) / 2,
        ended=torch.tensor([True, False, True]),
        **per_token,
    )


@pytest.mark.parametrize("name", [field.name for field in fields(RolloutBatch)])
def test_a_field_of_another_shape_is_refused_by_its_name(name: str) -> None:
    whole = batch()
    with pytest.raises(ValueError, match=r"RolloutBatch\."):
        replace(whole, **{name: getattr(whole, name)[:2]})


def test_nothing_is_mutated() -> None:
    with pytest.raises(FrozenInstanceError):
        batch().scores = torch.zeros(3)  # type: ignore[misc]


def test_selected_rows_lose_the_columns_that_are_padding_in_all_of_them() -> None:
    whole, rows = batch(), torch.tensor([2, 0])
    few = whole.select(rows)
    assert few.prompt_ids.shape == (2, 2)
    assert few.response_ids.shape == (2, 3)
    assert torch.equal(few.prompt_ids, whole.prompt_ids[rows, 3:])
    assert torch.equal(few.logprobs, whole.logprobs[rows, :3])
    assert few.scores.tolist() == [2.0, 0.0]
    assert few.ended.tolist() == [True, True]
    assert few.lengths.tolist() == [2, 3]


def test_selecting_loses_no_token() -> None:
    whole = batch()
    for row in range(3):
        one = whole.select(torch.tensor([row]))
        assert one.input_ids.shape == (1, PROMPTS[row] + RESPONSES[row])
        assert one.attention_mask.all()
        assert torch.equal(one.input_ids[0], whole.input_ids[row, whole.attention_mask[row]])


def test_a_row_without_a_response_keeps_one_column() -> None:
    whole = replace(batch(), mask=torch.zeros(3, 4, dtype=torch.bool))
    assert whole.select(torch.tensor([1])).response_ids.shape == (1, 1)
