from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch import Tensor

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
        scores=torch.arange(3.0),
        shaped_scores=torch.arange(3.0) / 2,
        ended=torch.tensor([True, False, True]),
        prompts=["p"] * 3,
        responses=["r"] * 3,
        **per_token,
    )


@pytest.mark.parametrize("name", [f.name for f in fields(RolloutBatch) if isinstance(getattr(batch(), f.name), Tensor)])
def test_a_field_of_another_shape_is_refused_by_its_name(name: str) -> None:
    whole = batch()
    with pytest.raises(ValueError, match=r"RolloutBatch\.\w+ has shape"):
        replace(whole, **{name: getattr(whole, name)[:2]})


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
