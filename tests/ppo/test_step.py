"""The loop: it learns, what one update does and returns, and what goes on from a saved state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf_kl.ppo.step as ppo_module
from rlhf_kl.control import FixedKL, Guard
from rlhf_kl.distributed import Ranks
from rlhf_kl.events import Event, LearningRateChanged, NoProgress, UpdateSkipped
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.ops.masked import Mean
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.types import RolloutBatch
from tests.made import Make, Recorder, row_of, weights


def test_it_learns_to_write_one_letter(make_trainer: Make) -> None:
    trainer: PPOTrainer = make_trainer(ppo={"total_episodes": 20 * 32})
    rows = [row_of(trainer, step) for step in range(1, 21)]
    scores = [row["objective/scores"] for row in rows]
    assert scores[0] < 2.5
    assert sum(scores[-3:]) / 3 > scores[0] + 2.0
    for row in rows:
        for key in ("policy/loss", "value/loss", "kl/token", "policy/grad_norm"):
            assert math.isfinite(row[key]), (row["step"], key)
    assert rows[0]["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["kl/token"] > 0.05


@pytest.mark.parametrize(
    ("coef", "size", "updates", "rate"),
    [
        (0.02, 32, 24, 2e-3),
        pytest.param(0.02, 64, 40, 1e-3, marks=pytest.mark.slow),
        pytest.param(2.0, 64, 40, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_the_kl_lands_at_its_target(make_trainer: Make, coef: float, size: int, updates: int, rate: float) -> None:
    """From a beta that, left alone, ends at eleven times the target, and from one that ends at half of it."""
    trainer: PPOTrainer = make_trainer(
        rollout={"batch_size": size},
        ppo={"total_episodes": updates * size, "learning_rate": rate},
        kl={"target": 0.1, "ceiling": {"value": "1.5x"}, "controller": {"kind": "adaptive", "coef": coef}},
    )
    tail = [row_of(trainer, step)["kl/token"] for step in range(1, updates + 1)][updates // -2 :]
    assert sum(tail) / len(tail) == pytest.approx(0.1, rel=0.25)
    assert min(tail) > 0.03
    assert max(tail) < 0.155  # the ceiling is 0.15


def test_an_update_depends_on_seed_and_step_alone(make_trainer: Make) -> None:
    one, same = make_trainer(), make_trainer()
    torch.manual_seed(1)
    first = one.update(3)
    torch.manual_seed(2)
    again = same.update(3)
    assert torch.equal(first.rollout.response_ids, again.rollout.response_ids)
    assert torch.equal(weights(one.model.modules), weights(same.model.modules))
    other = make_trainer(run={"seed": 1}).update(3)
    assert other.rollout.responses != first.rollout.responses


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_controller_is_updated_once_a_rollout_with_what_is_logged(make_trainer: Make, unit: str) -> None:
    law = Recorder(0.2)
    trainer = make_trainer(controller=Guard(law), kl={"unit": unit})
    updates, expected = [], []
    for step in (1, 2, 3):
        updates.append(trainer.update(step))
        expected.append(trainer.ceiling.seen(updates[-1].move))
    rows = [update_row(update, trainer.settings) for update in updates]
    assert law.updates == [(pytest.approx(row[f"kl/{unit}"], rel=1e-6), 32) for row in rows]
    assert [before for before, _, _ in law.observed] == [kl for kl, _ in law.updates]
    assert law.observed == expected
    assert [row["kl/coef"] for row in rows] == pytest.approx([0.2, 0.4, 0.8])
    assert [row["kl/coef_next"] for row in rows] == pytest.approx([0.4, 0.8, 1.6])
    for update, row in zip(updates, rows, strict=True):
        rollout = update.rollout
        per_row = [float(kl[mask].sum()) for kl, mask in zip(rollout.exact_kl, rollout.mask, strict=True)]
        assert row["kl/sequence"] == pytest.approx(sum(per_row) / 32, rel=1e-5, abs=1e-9)
        assert row["kl/token"] == pytest.approx(sum(per_row) / int(rollout.mask.sum()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("size", "group", "read"), [(64, 2, 32), (64, 64, 64), (16, 2, 16), (96, 32, 64)])
def test_the_kl_after_an_update_needs_the_change_at_half_of_the_prompts(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, size: int, group: int, read: int
) -> None:
    """Beside the KL at all states, which the rollout's own formula gives for its columns of the moved policy."""
    passes: list[Sequence[int]] = []
    inner = ppo_module.exact_kl_now

    def counted(*args: Any) -> Tensor:
        passes.append(args[-1])
        return inner(*args)

    monkeypatch.setattr(ppo_module, "exact_kl_now", counted)
    rollout = {"batch_size": size, "samples_per_prompt": group}
    trainer = make_trainer(
        rollout=rollout, ppo={"minibatch_size": size}, kl={"ceiling": {"value": 1e3}, "unit": "sequence"}
    )
    batch, row = (update := trainer.update(1)).rollout, update.move
    assert [len(rows) for rows in passes] == [read]
    moved = inner(trainer.model.policy, trainer.reference, batch, 1.0, range(size))
    exact = replace(batch, exact_kl=moved).kl("sequence")
    assert exact.mean > 1e-4
    assert row.kl_after == pytest.approx(exact.mean, rel=0.2)
    if read == size:
        assert row.kl_after == pytest.approx(exact.mean, rel=1e-4)


@pytest.mark.parametrize("value", ["head", "separate", "features"])
def test_a_warm_up_trains_the_value_function_only(make_trainer: Make, new_model: Make, value: str) -> None:
    """Also one that is a head on the policy's own trunk."""
    kinds = {
        "head": {},
        "separate": {"trunk": new_model(seed=8, spread=0.1).base_model},
        "features": {"critic": FeatureCritic(16, mean=0.0, scale=1.0, seed=0)},
    }
    trainer = make_trainer(**kinds[value], ppo={"value_warmup": 1})
    learns = trainer.model.value or trainer.model.critic
    policy, before = weights(trainer.model.policy.module), weights(learns)
    row = row_of(trainer, 1)
    assert math.isfinite(row["value/loss"])
    assert math.isnan(row["policy/logratio_first_max"]) == (value == "features")  # no pass of the policy
    assert torch.equal(weights(trainer.model.policy.module), policy)
    assert not torch.equal(weights(learns), before)
    trainer.update(2)
    assert not torch.equal(weights(trainer.model.policy.module), policy)


def test_the_value_function_learns_the_returns(make_trainer: Make, new_model: Make) -> None:
    """A score that the prompt alone decides can be told from the first token on."""

    def of_prompt(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [2.0 * len(prompt) for prompt in prompts]

    ppo = {"value_warmup": 100, "vf_coef": 1.0, "cliprange_value": 10.0, "lam": 1.0, "learning_rate": 1e-2}
    trunk = new_model(seed=8, spread=0.1).base_model
    trainer = make_trainer(trunk=trunk, ppo=ppo, reward=of_prompt, shaping=ScoreShaping(mean=4.8, std=2.0))
    explained = [row_of(trainer, step)["value/explained_variance"] for step in range(1, 13)]
    assert explained[0] == pytest.approx(0.0, abs=1e-3)  # the head starts at zero
    assert explained[-1] > 0.5


def test_an_update_ends_before_the_first_step_from_too_far(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first minibatch the policy has not moved; at the second it has, and takes no step any more."""
    drop, dropped = Ranks.drop, list[int]()

    def noted(self: Ranks, optimizer: Any, parameters: Any) -> None:  # with several ranks, gradients travel already
        dropped.append(len(list(parameters)))
        drop(self, optimizer, parameters)

    monkeypatch.setattr(Ranks, "drop", noted)
    free, short = make_trainer(ppo={"epochs": 4}), make_trainer(ppo={"epochs": 4, "max_update_kl": 1e-9})
    whole, row = row_of(free, 1), row_of(short, 1)
    assert whole["policy/epochs"] == 4
    loose = make_trainer(ppo={"epochs": 4, "max_update_kl": 4 * whole["policy/approx_kl"]})  # a mean, not a sum
    assert row_of(loose, 1)["policy/epochs"] == 4
    assert row["policy/epochs"] == 0.5
    assert row["policy/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert max(int(state["step"]) for state in short.optimizer.state.values()) == 1
    assert dropped == [len(short.trained)]
    assert all(parameter.grad is None for parameter in short.trained)


def test_while_the_policy_is_frozen_its_controller_and_its_ceiling_learn_nothing(make_trainer: Make) -> None:
    law = Recorder(0.2)
    trainer = make_trainer(
        ppo={"value_warmup": 3}, controller=Guard(law), kl={"target": 0.1, "ceiling": {"value": "1.5x"}}
    )
    start = trainer.state_dict()["ceiling"]
    assert start["made"] is None
    rows = [row_of(trainer, step) for step in (1, 2, 3)]
    assert [row["kl/coef_next"] for row in rows] == [0.2, 0.2, 0.2]
    assert (law.updates, law.observed) == ([], [])
    assert trainer.state_dict()["ceiling"] == start
    assert [row["kl/after_update"] for row in rows] == [row["kl/token"] for row in rows]
    row_of(trainer, 4)
    assert len(law.updates) == len(law.observed) == 1
    assert trainer.state_dict()["ceiling"]["made"] is not None


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_rate_that_is_too_high_is_lowered_told_to_the_law_and_saved(make_trainer: Make, unit: str) -> None:
    settings = {
        "ppo": {"lr_schedule": "adaptive", "total_episodes": 320, "learning_rate": 0.03},
        "kl": {"unit": unit, "target": 0.1, "controller": {"kind": "adaptive", "coef": 0.05}},
    }
    trainer, told = make_trainer(**settings), []
    trainer.controller.law.observe_rate = told.append
    moves: list[tuple[float, float]] = []
    observe = trainer.rate.adaptive.observe

    def noted(step: int, move: Any, *kl_and_tokens: float) -> list[Event]:
        moves.append(kl_and_tokens)
        return observe(step, move, *kl_and_tokens)

    trainer.rate.adaptive.observe = noted
    update = trainer.update(1)
    tokens = float(update.rollout.lengths.float().mean()) if unit == "sequence" else 1.0
    assert moves == [pytest.approx((update.mean("approx_kl") * tokens, tokens))]
    assert isinstance(update.events[-1], LearningRateChanged)
    assert trainer.rate.adaptive.factor < 1.0
    again = make_trainer(**settings)
    again.load_state_dict(trainer.state_dict())
    assert again.state_dict() == trainer.state_dict()
    rate = row_of(trainer, 2)["policy/learning_rate"]
    assert rate == pytest.approx(0.03 * 0.9 * trainer.rate.adaptive.used)  # the schedule falls by a tenth besides
    assert told == [pytest.approx(rate / 0.03)]


@pytest.mark.parametrize(("kind", "told"), [("adaptive", True), ("fixed", False)])
def test_only_a_beta_that_moves_can_stop_for_want_of_progress(make_trainer: Make, kind: str, told: bool) -> None:
    kl = {"target": 1e-6, "controller": {"kind": kind, "coef": 0.01}, "ceiling": None}
    trainer = make_trainer(kl=kl, ppo={"learning_rate": 1e-2})
    trainer.progress.start = Mean(1e6, 0.0)  # a score that no response has
    events = [event for step in range(1, 6) for event in trainer.update(step).events]
    assert any(isinstance(event, NoProgress) for event in events) == told


class Shrinks:
    """A law that halves the policy's way from its reference after each update."""

    coef = 0.05

    def update(self, kl: float, episodes: int) -> None:
        pass

    def scale(self) -> float:
        return 0.5


def test_a_law_can_scale_the_way_from_the_reference(make_trainer: Make) -> None:
    """Every weight by the same share, so that the KL at the same states is the square of a law's share of it."""
    settings: dict[str, Any] = {"ppo": {"learning_rate": 3e-3}, "kl": {"ceiling": {"value": 1e3}}}
    whole, half = (make_trainer(controller=Guard(law), **settings) for law in (FixedKL(coef=0.05), Shrinks()))
    start = weights(whole.model.policy.module)
    moves = [trainer.update(1).move for trainer in (whole, half)]
    share = moves[1].scale
    torch.testing.assert_close(
        weights(half.model.policy.module) - start, (weights(whole.model.policy.module) - start) * share
    )
    assert (moves[0].scale, share) == (1.0, pytest.approx(0.5, rel=0.2))
    assert moves[1].kl_after == pytest.approx(moves[0].kl_after / 4, rel=0.05)
    assert half.rollouts(2).kl("token").mean == pytest.approx(moves[1].kl_after, rel=0.4)


def test_a_constant_beta_leaves_the_rate_to_its_schedule(make_trainer: Make) -> None:
    trainer = make_trainer(ppo={"lr_schedule": "adaptive", "total_episodes": 128, "learning_rate": 0.03})
    rates = [row_of(trainer, step)["policy/learning_rate"] for step in (1, 2)]
    assert rates == pytest.approx([0.03, 0.0225])


def test_a_rollout_that_is_not_finite_changes_nothing(make_trainer: Make) -> None:
    trainer = make_trainer()
    assess = trainer.rollouts.assess
    before, state = weights(trainer.model.modules), trainer.state_dict()

    def spoilt(*drawn: Any) -> RolloutBatch:
        rollout = assess(*drawn)
        return replace(rollout, shaped_scores=rollout.shaped_scores * torch.nan)

    trainer.rollouts.assess = spoilt
    update = trainer.update(1)
    assert update.events == [UpdateSkipped("a score was not finite")]
    assert len(update.rollout) == 32
    assert torch.equal(weights(trainer.model.modules), before)
    assert trainer.state_dict() == state


def test_an_update_with_a_gradient_that_is_not_finite_says_so(make_trainer: Make) -> None:
    trainer = make_trainer(ppo={"epochs": 1})
    head = trainer.model.value.head

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * torch.nan

    handle = head.weight.register_hook(spoil)
    before = weights(trainer.model.modules)
    assert trainer.update(1).events == [UpdateSkipped("a gradient was not finite")]
    assert torch.equal(weights(trainer.model.modules), before)
    handle.remove()
    assert not trainer.update(2).events


class HearsProgress(Recorder):
    """Writes down, too, whether the score rises with the KL."""

    def __init__(self) -> None:
        super().__init__()
        self.rises: list[bool] = []

    def observe_progress(self, rises: bool) -> None:
        self.rises.append(rises)


@pytest.mark.parametrize(("start", "rises"), [(1e6, [True, True, True, False, False]), (-1e6, [True] * 5)])
def test_law_and_rate_are_told_whether_the_score_rises(make_trainer: Make, start: float, rises: list[bool]) -> None:
    """From the third rollout with a KL on; a run that goes on from a checkpoint counts further."""
    options: dict[str, Any] = {"kl": {"target": 1e-6}, "ppo": {"learning_rate": 1e-2, "lr_schedule": "adaptive"}}
    law, of_rate = HearsProgress(), list[bool]()
    trainer = make_trainer(controller=Guard(law), **options)
    choose = trainer.rate.choose
    trainer.rate.choose = lambda step, kl, *, progress: of_rate.append(progress) or choose(step, kl, progress=progress)
    trainer.progress.start = Mean(start, 0.0)
    for step in range(1, 6):
        trainer.update(step)
    assert law.rises == of_rate == rises
    again = make_trainer(controller=Guard(HearsProgress()), **options)
    again.load_state_dict(trainer.state_dict())
    assert again.progress.count == trainer.progress.count == 4
    assert again.state_dict()["progress"] == trainer.state_dict()["progress"]
