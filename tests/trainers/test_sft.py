from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.trainers.sft import TextObjective

Make = Callable[..., Any]


def test_the_loss_is_that_of_transformers_over_text_and_eos(new_model: Make, letters: Any) -> None:
    model = new_model()
    objective = TextObjective(TransformersLM(model), letters, ["abcd", "b"], context=32)
    rows = [[1, 3, 4, 5, 6, 2], [1, 4, 2]]
    assert objective.rows == rows
    for i, row in enumerate(rows):
        ids = torch.tensor([row])
        mean = model(input_ids=ids, labels=ids).loss
        total, _ = objective.loss([i])
        assert objective.weight(i) == len(row) - 1
        torch.testing.assert_close(total, mean * (len(row) - 1))


def test_a_batch_sums_its_rows_whatever_their_length(new_model: Make, letters: Any) -> None:
    objective = TextObjective(TransformersLM(new_model()), letters, ["abcd", "b", "dd"], context=32)
    alone = sum(objective.loss([i])[0] for i in range(3))
    torch.testing.assert_close(objective.loss([2, 0, 1])[0], alone)


def test_long_texts_are_cut_and_counted(new_model: Make, letters: Any) -> None:
    objective = TextObjective(TransformersLM(new_model(context=4)), letters, ["abcd", "ab", "abc"], context=4)
    assert objective.rows == [[1, 3, 4, 5], [1, 3, 4, 2], [1, 3, 4, 5]]
    assert objective.truncated == 2
    assert [objective.size(i) for i in range(3)] == [4, 4, 4]
    assert float(objective.loss([0, 1, 2])[0].detach()) > 0


@pytest.mark.parametrize("context", [None, 32])
def test_without_a_limit_nothing_is_cut(new_model: Make, letters: Any, context: int | None) -> None:
    assert TextObjective(TransformersLM(new_model()), letters, ["abcd"], context=context).truncated == 0
