from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_kl.models.lm import LM
from rlhf_kl.trainers.tasks import TextTask

Make = Callable[..., Any]


def test_the_loss_is_that_of_transformers_over_text_and_eos(new_model: Make, letters: Any) -> None:
    model = new_model()
    task = TextTask(LM(model), letters, ["abcd", "b"])
    rows = [[1, 3, 4, 5, 6, 2], [1, 4, 2]]
    assert task.rows == rows
    for i, row in enumerate(rows):
        ids = torch.tensor([row])
        mean = model(input_ids=ids, labels=ids).loss
        total, _ = task.loss([i])
        assert task.weight(i) == len(row) - 1
        torch.testing.assert_close(total, mean * (len(row) - 1))


def test_a_batch_sums_its_rows_whatever_their_length(new_model: Make, letters: Any) -> None:
    task = TextTask(LM(new_model()), letters, ["abcd", "b", "dd"])
    alone = sum(task.loss([i])[0] for i in range(3))
    torch.testing.assert_close(task.loss([2, 0, 1])[0], alone)


def test_long_texts_are_cut_and_counted(new_model: Make, letters: Any) -> None:
    task = TextTask(LM(new_model(context=4)), letters, ["abcd", "ab", "abc"])
    assert task.rows == [[1, 3, 4, 5], [1, 3, 4, 2], [1, 3, 4, 5]]
    assert task.notes == ["2 of 3 texts are longer than the context and are cut off"]
    assert [task.size(i) for i in range(3)] == [4, 4, 4]
    assert float(task.loss([0, 1, 2])[0].detach()) > 0
