from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.config.schema import SFTSection
from rlhf_kl.models.lm import LM
from rlhf_kl.trainers.supervised import SupervisedTrainer
from rlhf_kl.trainers.tasks import TextTask

Make = Callable[..., Any]
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


def test_the_loss_falls_to_that_of_a_text_known_by_heart(make: Make) -> None:
    trainer = make(["abcd" * 4] * 8, epochs=20.0, learning_rate=1e-2)
    rows = list(trainer.train())
    assert rows[0]["train/loss"] > 1.5
    assert rows[-1]["train/loss"] < 0.1
    assert [row["step"] for row in rows] == list(range(1, 41))


def test_every_row_comes_once_an_epoch(make: Make) -> None:
    trainer = make(epochs=2.0)
    assert trainer.steps == 6  # ten rows in batches of 4, 4 and 2
    for epoch in (0, 3):
        seen = [row for step in range(1, 4) for row in trainer.batch(epoch + step)]
        assert sorted(seen) == list(range(10))
    assert trainer.batch(1) != trainer.batch(4)


def test_a_part_of_an_epoch(make: Make) -> None:
    assert make(epochs=0.34).steps == 1
    assert make(epochs=1e-9).steps == 1


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


def test_going_on_is_the_same_as_going_through(make: Make) -> None:
    whole = make(epochs=2.0)
    list(whole.train())
    first = make(epochs=2.0)
    for row in first.train():
        if row["step"] == 3:
            break
    later = make(epochs=2.0)
    later.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    later.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    list(later.train(start=4))
    assert torch.equal(weights(later), weights(whole))


def test_the_rate_rises_and_falls(make: Make) -> None:
    trainer = make(epochs=4.0, warmup=0.25, lr_schedule="linear", learning_rate=1e-3)
    rates = [row["train/learning_rate"] for row in trainer.train()]
    assert 0 < rates[0] < rates[1] < rates[2]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] > 0
    assert max(rates) <= 1e-3


def test_a_gradient_that_is_not_finite_is_left_out(make: Make) -> None:
    trainer = make()
    before = weights(trainer)
    task = trainer.task
    trainer.task = _Poisoned(task)
    trainer.step(1)
    assert torch.equal(weights(trainer), before)
    trainer.task = task
    trainer.step(2)
    assert weights(trainer).isfinite().all()


class _Poisoned:
    def __init__(self, task: TextTask) -> None:
        self.task = task

    def __len__(self) -> int:
        return len(self.task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, rows: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        total, sums = self.task.loss(rows)
        return total * torch.nan, sums


def test_a_long_row_does_not_stretch_the_short_ones(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_kl.trainers.supervised.pass_overhead", lambda _device: 5)
    trainer = make(["a", "b" * 20, "c", "ab"], microbatch_size=4)
    passes: list[list[int]] = []
    learn = trainer.task.loss
    monkeypatch.setattr(trainer.task, "loss", lambda rows: (passes.append(sorted(rows)), learn(rows))[1])
    trainer.step(1)
    assert passes == [[0, 2, 3], [1]]
