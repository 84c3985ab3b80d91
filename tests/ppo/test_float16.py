"""Layers in float16: the same training as in float32, and the scale of the loss that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_kl.distributed import Ranks
from rlhf_kl.events import UpdateSkipped
from rlhf_kl.gradients import GROWS_AFTER, LEAST_SCALE, MOST_SCALE, SCALE, LossScale
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.ppo.objectives import Loss
from rlhf_kl.ppo.step import PPOTrainer, Update
from tests.made import Make

CPU = torch.device("cpu")


def weights(trainer: PPOTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.trained])


def broken(update: Update) -> list[str]:
    return [event.reason for event in update.events if isinstance(event, UpdateSkipped)]


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_figures_are_those_of_float32_on_the_same_texts(make_trainer: Make, advantage: str) -> None:
    """Twenty updates, of which one training reads what the other has sampled: only rounding is different."""
    sections: dict[str, Any] = {"ppo": {"advantage": advantage}}
    if advantage == "rloo":
        sections["rollout"] = {"samples_per_prompt": 4}
    trainers = [make_trainer(run={"dtype": dtype}, **sections) for dtype in ("float32", "float16")]
    sample, rows = trainers[0].rollouts.sample, list[list[dict[str, Any]]]()
    for step in range(1, 21):
        responses, sampled = sample(step)
        for trainer in trainers:
            trainer.rollouts.sample = lambda _, drawn=(responses, sampled._replace(states=None)): drawn  # noqa: B008
        updates = [trainer.update(step) for trainer in trainers]
        assert [broken(update) for update in updates] == [[], []]
        rows.append([update_row(u, t.settings) for u, t in zip(updates, trainers, strict=True)])
    assert sum(row["policy/overflows"] for _, row in rows) == 0
    assert rows[-1][0]["kl/token"] > 0.02
    for key in ("kl/token", "policy/loss", "policy/grad_norm", *(["value/loss"] if advantage == "gae" else [])):
        pairs = torch.tensor([[row[key] for row in pair] for pair in rows], dtype=torch.float64)
        assert float((pairs[:, 1] - pairs[:, 0]).norm() / pairs[:, 0].norm()) < 0.01, key
    assert not torch.equal(*map(weights, trainers))


def test_steps_that_overflow_are_left_out_until_the_scale_fits(make_trainer: Make) -> None:
    trainer = make_trainer(run={"dtype": "float16"})
    trainer.scale.factor.fill_(2.0**60)
    before = weights(trainer)
    first = trainer.update(1)
    assert first.overflows == len(first.steps) == 4
    assert first.taken == []
    assert first.events == []
    assert torch.equal(weights(trainer), before)
    row = update_row(first, trainer.settings)
    assert (row["policy/overflows"], row["policy/loss_scale"]) == (4, MOST_SCALE / 8)  # the first brings it to its most
    assert math.isnan(row["policy/loss"])
    later = [trainer.update(step) for step in range(2, 8)]
    assert not any(map(broken, later))
    assert later[-1].overflows == 0
    assert len(later[-1].taken) == 4
    assert not torch.equal(weights(trainer), before)


def test_a_gradient_that_no_scale_mends_is_broken(make_trainer: Make) -> None:
    trainer = make_trainer(run={"dtype": "float16"}, ppo={"epochs": 1})
    trainer.scale.factor.fill_(2.0)
    trainer.model.value.head.weight.register_hook(lambda gradient: gradient * torch.nan)
    update = trainer.update(1)  # two steps: the second one at the least scale
    assert update.overflows == 1
    assert broken(update) == ["a gradient was not finite"]
    assert update.loss_scale == LEAST_SCALE


def test_a_loss_that_is_not_finite_is_told_at_once(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(run={"dtype": "float16"})
    loss = trainer.loss

    def spoilt(*arguments: Any) -> Loss:
        found = loss(*arguments)
        return Loss(**vars(found) | {"policy": found.policy * torch.nan})

    monkeypatch.setattr(trainer, "loss", spoilt)
    assert broken(trainer.update(1)) == ["a gradient was not finite"]


def test_float32_and_bfloat16_have_no_scale(make_trainer: Make) -> None:
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(run={"dtype": dtype})
        assert "scale" not in trainer.state_dict()
        assert "policy/loss_scale" not in update_row(trainer.update(1), trainer.settings)


# ---- the scale itself


@pytest.mark.parametrize("overflows", [[], [0], [0, 1, 2], [5, 199, 200, 401], range(0, 640, 150)])
def test_the_scale_moves_as_that_of_torch(overflows: Sequence[int]) -> None:
    ours, parameter = LossScale(CPU), nn.Parameter(torch.zeros(3))
    torchs = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWS_AFTER)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    torchs.scale(torch.ones(()))
    for step in range(640):
        finite = step not in overflows
        parameter.grad = torch.full((3,), 1.0 if finite else torch.inf)
        torchs.unscale_(optimizer)
        torchs.step(optimizer)
        torchs.update()
        ours.observe(torch.tensor(finite))
        assert float(ours.factor) == torchs.get_scale(), step
    assert ours.read() == (torchs.get_scale(), len(overflows))
    assert ours.read()[1] == 0  # counted once


def test_the_scale_stays_within_its_bounds() -> None:
    scale = LossScale(CPU)
    for finite, bound, counted in ((False, LEAST_SCALE, 16), (True, MOST_SCALE, 0)):
        for _ in range(25 * GROWS_AFTER):
            scale.observe(torch.tensor(finite))
        assert scale.read() == (bound, counted)


def test_a_step_is_that_of_the_loss_itself_clipped_or_not() -> None:
    """Powers of two change no digit of a number in float32."""
    for most in (math.inf, 0.1):
        found = []
        for scale in (None, LossScale(CPU)):
            torch.manual_seed(0)
            layer = nn.Linear(4, 3)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
            loss = layer(torch.ones(2, 4)).square().sum()
            (loss if scale is None else scale(loss)).backward()
            norm = Ranks().step(optimizer, layer.parameters(), most, scale)
            found.append(torch.cat([norm.view(1), *(p.detach().flatten() for p in layer.parameters())]))
        assert torch.equal(*found)
        assert float(found[0][0]) > 1.0


def test_the_state_of_a_scale_is_exact() -> None:
    scale, other = LossScale(CPU), LossScale(CPU)
    for finite in (False, True, True, False, True):
        scale.observe(torch.tensor(finite))
    other.load_state_dict(scale.state_dict())
    for _ in range(GROWS_AFTER - 1):
        for each in (scale, other):
            each.observe(torch.tensor(True))
        assert other.state_dict() == scale.state_dict()
    assert scale.state_dict() == {"factor": SCALE / 2, "steps": 0.0}
