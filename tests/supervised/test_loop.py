from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_kl.config.schema.supervised import SFTSection
from rlhf_kl.models.lm import LM
from rlhf_kl.supervised.loop import SupervisedTrainer
from rlhf_kl.supervised.tasks import TextTask
from tests.made import Make

TEXTS = ["abcd" * 3, "abab", "a", "abcd", "dcba" * 2, "b", "abcdabcd", "cc", "abc", "d" * 9]


@pytest.fixture
def make(new_model: Make, letters: Any) -> Make:
    def make(texts: list[str] = TEXTS, seed: int = 0, **settings: Any) -> SupervisedTrainer:
        model = new_model(spread=0.1)
        section = SFTSection.model_validate({"batch_size": 4, "microbatch_size": 2} | settings)
        return SupervisedTrainer(TextTask(LM(model), letters, texts), section, seed)

    return make


def weights(trainer: SupervisedTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_every_row_comes_once_an_epoch(make: Make) -> None:
    trainer = make(epochs=2.0)
    assert trainer.steps == 6  # ten rows in batches of 4, 4 and 2
    for epoch in (0, 3):
        seen = [row for step in range(1, 4) for row in trainer.batch(epoch + step)]
        assert sorted(seen) == list(range(10))
    assert trainer.batch(1) != trainer.batch(4)


def test_the_size_of_a_microbatch_is_no_part_of_the_result(make: Make) -> None:
    found = []
    for size in (1, 2, 4):
        trainer = make(microbatch_size=size)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        start = weights(trainer)
        row = trainer.step(1)
        found.append((weights(trainer) - start, row["train/loss"]))
    assert float(found[0][0].abs().max()) > 1e-5
    for moved, loss in found[1:]:
        torch.testing.assert_close(moved, found[0][0], rtol=1e-3, atol=1e-6)
        assert loss == pytest.approx(found[0][1], rel=1e-5)


def test_a_step_goes_down_the_mean_over_tokens(make: Make) -> None:
    trainer = make(max_grad_norm=1e9, warmup=0.0, lr_schedule="constant", learning_rate=1.0)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    rows = trainer.batch(1)
    tokens = sum(len(TEXTS[row]) + 1 for row in rows)  # with the eos
    loss, _ = trainer.task.loss(rows)
    grads = torch.autograd.grad(loss / tokens, list(trainer.model.parameters()))
    start = weights(trainer)
    row = trainer.step(1)
    assert row["train/loss"] == pytest.approx(float(loss.detach()) / tokens, rel=1e-5)
    moved = weights(trainer) - start
    torch.testing.assert_close(-moved, torch.cat([g.flatten() for g in grads]), rtol=1e-3, atol=1e-6)
