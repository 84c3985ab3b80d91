from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_kl.training.samples import sample_rows
from rlhf_kl.types import RolloutBatch

ROWS, WIDTH = 8, 3


def test_the_first_ones_and_those_that_diverge_most(letters: Any) -> None:
    mask = torch.arange(WIDTH) < torch.tensor([3, 2, 3, 3, 1, 3, 3, 3]).unsqueeze(1)
    kl = torch.where(mask, 0.1, 0.0)
    kl[4, 0], kl[6, 1], kl[1, 1] = 3.0, 2.0, 1.0  # the furthest tokens, in responses of 3.0, 2.2 and 1.1 nats
    ids = torch.full((ROWS, WIDTH), 3)
    ids[6, 1] = 4
    rollout = RolloutBatch(
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1],
        response_ids=ids,
        mask=mask,
        logprobs=torch.where(mask, -1.0, 0.0),
        ref_logprobs=torch.where(mask, -1.5, 0.0),
        exact_kl=kl,
        **dict.fromkeys(("entropy", "k1_variance", "logprob_variance", "values", "drawn"), torch.zeros(ROWS, WIDTH)),
        scores={"reward": torch.arange(ROWS).float()},
        shaped_scores=torch.zeros(ROWS),
        ended=mask[:, 0],
        prompts=[f"p{i}" for i in range(ROWS)],
        rows=[{}] * ROWS,
        responses=[f"r{i}" for i in range(ROWS)],
    )
    rows = list(sample_rows(7, rollout, letters))
    # Of those with the largest KL r1, further off than the rest, is among the first.
    chosen = [*((f"r{i}", "first") for i in range(4)), ("r4", "largest kl"), ("r6", "largest kl")]
    assert [(row["response"], row["chosen"]) for row in rows] == chosen
    assert {row["step"] for row in rows} == {7}
    assert [row["score"] for row in rows[3:5]] == [3.0, 4.0]
    assert [len(row["tokens"]) for row in rows] == [3, 2, 3, 3, 1, 3]
    assert rows[5]["kl"] == pytest.approx(2.2)
    assert rows[5]["tokens"][1] == {"text": "b", "logprob": -1.0, "ref_logprob": -1.5, "kl": 2.0}
