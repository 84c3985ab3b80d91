"""One minibatch of the loop: what its gradient may depend on, and how much memory it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.ops.head import Head
from rlhf_kl.ppo.objectives import Tokens, ppo_targets
from rlhf_kl.ppo.step import PPOTrainer, Update
from rlhf_kl.types import RolloutBatch
from tests.made import Make, row_of, weights


def plain_sgd(modules: Any) -> Any:
    """A step of size 1 along the gradient: what moved is the gradient itself."""
    return torch.optim.SGD(modules.parameters(), lr=1.0)


Rolled = tuple[PPOTrainer, RolloutBatch, Tokens]


@pytest.fixture
def rolled(make_trainer: Make) -> Callable[..., Rolled]:
    """A trainer, a rollout with responses of unequal length, and targets; nothing trained yet."""

    def make(**ppo: Any) -> Rolled:
        trainer: PPOTrainer = make_trainer(
            optimizer=plain_sgd,
            ppo={"max_grad_norm": 1e9, "learning_rate": 1.0, "vf_coef": 1.0} | ppo,
            kl={"placement": "rao_blackwell", "estimator": "exact"},
        )
        before = copy.deepcopy(trainer.model.modules.state_dict())
        rollout = trainer.update(1).rollout
        trainer.model.modules.load_state_dict(before)
        assert len(set(rollout.lengths.tolist())) > 3
        return trainer, rollout, ppo_targets(rollout, 0.5, trainer.settings)

    return make


def take_step(trainer: PPOTrainer, rollout: RolloutBatch, targets: Tokens, rows: Tensor) -> float:
    """One minibatch; returns the gradient's norm."""
    tokens = targets.flat(rollout.device)
    trainer.backward(rollout.layout, tokens, rows, float(targets.weights[rows].sum()))
    return float(trainer.ranks.step(trainer.optimizer, trainer.trained, trainer.settings.max_grad_norm))


def step_taken(trainer: PPOTrainer, rollout: RolloutBatch, targets: Tokens, rows: Tensor) -> Tensor:
    """The gradient of a minibatch; the trainer is put back."""
    modules = trainer.model.modules
    before, start = copy.deepcopy(modules.state_dict()), weights(modules)
    take_step(trainer, rollout, targets, rows)
    moved = start - weights(modules)
    modules.load_state_dict(before)
    return moved


def test_the_size_of_a_microbatch_is_no_part_of_the_result(rolled: Make) -> None:
    rows = torch.arange(16)
    found = []
    for size in (16, 8, 1):
        trainer, rollout, targets = rolled(microbatch_size=size)
        found.append(step_taken(trainer, rollout, targets, rows))
    assert float(found[0].norm()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


def test_passes_of_their_own_size_have_room_and_change_nothing(rolled: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(16)
    whole: list[Any] = []
    narrow: list[Any] = []
    for room, passes in ((1 << 30, whole), (4 * 60 * 1000, narrow)):
        monkeypatch.setattr("rlhf_kl.memory.ROOM", {"cpu": room})
        monkeypatch.setattr("rlhf_kl.memory.kept_per_token", lambda _model: 1000)
        trainer, rollout, targets = rolled(microbatch_size=None)
        sizes = [packed.ids.numel() for packed in trainer.passes(rollout.layout, rows.tolist())]
        passes += [sizes, step_taken(trainer, rollout, targets, rows)]
    sizes, narrow_sizes = whole[0], narrow[0]
    assert max(narrow_sizes) <= 60 < sum(sizes)
    assert len(sizes) < len(narrow_sizes)
    torch.testing.assert_close(narrow[1], whole[1], rtol=1e-3, atol=1e-5)


def test_every_epoch_and_update_has_minibatches_and_noise_of_its_own(make_trainer: Make) -> None:
    trainer = make_trainer(ppo={"epochs": 2, "minibatch_size": 8}, rollout={"batch_size": 16})
    first, second = (torch.stack(list(trainer.minibatches(step))) for step in (1, 2))
    for rows in (*first.view(2, 16), *second.view(2, 16)):
        assert sorted(rows.tolist()) == list(range(16))  # each row once an epoch
    assert not torch.equal(first[:2], first[2:])
    assert not torch.equal(first, second)
    drawn, table = set(), trainer.rollouts.parts.prompts.table.pick([0])  # one prompt: only the noise differs
    for seed, step in ((0, 1), (0, 2), (1, 1)):
        trainer.rollouts.parts.prompts = PromptStream(table, 16, seed)
        drawn.add(tuple(trainer.rollouts.sample(step)[0].texts))
    assert len(drawn) == 3


def test_a_token_counts_the_same_in_every_row(rolled: Make) -> None:
    """The gradient of two rows is theirs weighted by length, and not the mean of their means."""
    trainer, rollout, targets = rolled(microbatch_size=1)
    lengths = rollout.lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())
    a, b = float(lengths[short]), float(lengths[long])
    assert b >= 3 * a
    one, other, both = (
        step_taken(trainer, rollout, targets, torch.tensor(rows)) for rows in ([short], [long], [short, long])
    )
    torch.testing.assert_close(both, (a * one + b * other) / (a + b), rtol=1e-3, atol=1e-5)


def test_a_response_without_a_score_counts_in_no_mean(make_trainer: Make) -> None:
    """One step of the whole batch is that of the scored rows alone, over their tokens."""
    trainer: PPOTrainer = make_trainer(
        optimizer=plain_sgd,
        rollout={"batch_size": 16},
        ppo={"max_grad_norm": 1e9, "learning_rate": 1.0, "minibatch_size": 16, "epochs": 1, "vf_coef": 1.0},
    )
    rollout = trainer.rollouts(1)
    rollout.scores["reward"][3] = torch.nan
    rollout.shaped_scores[3] = 0.0
    targets = ppo_targets(rollout, 0.5, trainer.settings)
    rows = torch.tensor([row for row in range(16) if row != 3])
    expected = step_taken(trainer, rollout, targets, rows)
    before = weights(trainer.model.modules)
    trainer.optimize(Update(rollout, 0.5, 0.5, 1.0), targets, 1)
    torch.testing.assert_close(before - weights(trainer.model.modules), expected, rtol=1e-3, atol=1e-5)


def test_the_gradient_is_scaled_down_to_its_largest_norm(rolled: Make) -> None:
    trainer, rollout, targets = rolled(max_grad_norm=0.01)
    moved = step_taken(trainer, rollout, targets, torch.arange(16))
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_no_pass_has_more_logits_than_there_is_room_for(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sampling, nor measuring, nor training, nor the ceiling; and all of them give what they gave at once."""
    kl = {"placement": "loss", "estimator": "exact", "target": 0.01, "ceiling": {"value": 0.02}}
    rows = []
    monkeypatch.setattr("rlhf_kl.ops.head.PER_PARAMETER", 0.0)
    for elements in (1 << 24, 7 * 20):
        monkeypatch.setattr("rlhf_kl.ops.head.LOGIT_ELEMENTS", {"cpu": elements})
        trainer = make_trainer(kl=kl, ppo={"learning_rate": 1e-2})
        sizes: list[int] = []
        for model in (trainer.model.policy.module, trainer.reference.lm.module):
            model.lm_head.register_forward_hook(lambda _head, _args, output, to=sizes: to.append(len(output)))
        rows.append([row_of(trainer, step) for step in (1, 2)])
    assert max(sizes) == 20
    assert min(row["kl/backtrack_factor"] for row in rows[0]) < 1
    for whole, chunked in zip(*rows, strict=True):
        for name, number in whole.items():
            if isinstance(number, float) and not name.startswith("policy/logratio"):
                assert chunked[name] == pytest.approx(number, rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize(("elements", "products"), [(1 << 24, 6.5), (7 * 20, 10.0)])
def test_products_with_the_head_for_each_token_of_an_update(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, elements: int, products: float
) -> None:
    """Sampling, both models' figures, the loss with two gradients, and half of the responses after the update.

    Where the logits do not fit at once, the loss computes both models' again, and the reference's are never kept.
    """
    monkeypatch.setattr("rlhf_kl.ops.head.LOGIT_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr("rlhf_kl.ops.head.PER_PARAMETER", 0.0)
    kl = {"target": 1.0, "ceiling": {"value": "1.5x"}}
    trainer = make_trainer(kl=kl, rollout={"batch_size": 32}, ppo={"epochs": 1})
    rows = [0.0]

    def count(weight: float) -> Callable[..., None]:
        return lambda _head, _inputs, outputs: rows.append(weight * len(outputs[0] if weight == 2.0 else outputs))

    for model in (trainer.model.policy.module, trainer.reference.lm.module):
        model.lm_head.register_forward_hook(count(1.0))
    trainer.model.policy.module.lm_head.register_full_backward_hook(count(2.0))
    tokens = int(trainer.update(1).rollout.mask.sum())
    assert sum(rows) / tokens == pytest.approx(products, abs=0.3)


@pytest.mark.parametrize(
    ("device", "parameters", "elements"),
    [
        ("cpu", 10**6, 1 << 25),
        ("cpu", 270_000_000, 135_000_000),
        ("cpu", 7 * 10**9, 1 << 28),
        ("cuda", 7 * 10**9, 1 << 28),
    ],
)
def test_a_chunk_grows_with_the_model_up_to_a_limit(device: str, parameters: int, elements: int) -> None:
    head = Head(lambda hidden: hidden, 1000, parameters)
    assert head.chunk(torch.device(device)) == elements // 1000


def test_responses_to_a_prompt_stay_in_one_minibatch(make_trainer: Make) -> None:
    """Where it has room for whole groups; each minibatch has one group of every few neighbours."""
    sizes: dict[str, Any] = {"rollout": {"batch_size": 16, "samples_per_prompt": 2}}
    trainer = make_trainer(ppo={"epochs": 2, "minibatch_size": 8}, **sizes)
    rows = torch.stack(list(trainer.minibatches(1)))
    for epoch in rows.view(2, 16):
        assert sorted(epoch.tolist()) == list(range(16))
    assert (rows[:, ::2] % 2 == 0).all()
    assert torch.equal(rows[:, 1::2], rows[:, ::2] + 1)
    assert torch.equal(rows[:, ::2] // 4, torch.arange(4).expand(4, 4))  # one of each two neighbouring groups
    cut = make_trainer(
        ppo={"epochs": 1, "minibatch_size": 2, "microbatch_size": None},
        rollout={"batch_size": 16, "samples_per_prompt": 4},
    )
    assert sorted(torch.cat(list(cut.minibatches(1))).tolist()) == list(range(16))
