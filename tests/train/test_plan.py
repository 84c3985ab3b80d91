from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.train.loop import evaluate_policy
from rlhf_kl.train.plan import SHARE, EvalPlan, plan_evaluations
from rlhf_kl.train.resolved import resolve
from rlhf_kl.train.setup import Setup, build_setup
from rlhf_kl.train.start import prepare_training


@pytest.fixture(scope="module")
def settings(tiny_settings: dict[str, Any]) -> Callable[..., TrainConfig]:
    def made(updates: int, **held: Any) -> TrainConfig:
        sections = {"ppo": {"total_episodes": updates * 32}, "rollout": {"batch_size": 32, "max_new_tokens": 12}}
        sections["eval"] = tiny_settings["eval"] | {"every": "auto", "max_documents": "auto"} | held
        merged = {name: tiny_settings.get(name, {}) | section for name, section in sections.items()}
        return TrainConfig.model_validate(tiny_settings | merged)

    return made


@pytest.fixture(scope="module")
def setup(settings: Callable[..., TrainConfig]) -> Setup:
    return build_setup(resolve(settings(20)), torch.device("cpu"))


def planned(config: TrainConfig, setup: Setup, before: EvalPlan | None = None) -> EvalPlan:
    return plan_evaluations(config, setup, ReferenceScores([0.0] * 128, [0] * 128, 12.0), before)


def test_start_and_evaluations_read_the_share_of_tokens_that_was_planned(
    settings: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the embeddings of both models read are counted, those with a backward pass three times."""
    monkeypatch.setattr("rlhf_kl.train.plan.SAMPLED", 1.0)
    monkeypatch.setattr("rlhf_kl.train.plan.UPDATED", 2.5)
    read = [0]

    def count(module: Any, inputs: Any, states: torch.Tensor) -> None:
        read[0] += inputs[0].numel() * (3 if states.requires_grad else 1)

    for lm in (setup.policy, setup.reference):
        lm.module.get_input_embeddings().register_forward_hook(count)

    def cost(work: Callable[[], Any]) -> int:
        before = read[0]
        work()
        return read[0] - before

    setup = replace(setup, sampling=replace(setup.sampling, eos_ids=[-1]))  # all responses have one length
    config = settings(20)
    made: list[Any] = []
    start = cost(lambda: made.append(prepare_training(config, setup)))
    training = made[0]
    first, later = (
        cost(lambda step=step: evaluate_policy(config, setup, training.plan, [], step=step)) for step in (1, 11)
    )
    update = cost(lambda: training.trainer.update(1))
    spent = start + first + later * -(-20 // training.plan.every)
    assert spent / (spent + 20 * update) == pytest.approx(training.plan.share, rel=0.2)
    assert training.plan.share <= 1.01 * SHARE


def test_penalties_and_the_rate_of_the_critic_are_those_of_the_config(tiny_settings: Any) -> None:
    penalties = {"missing_eos_penalty": 1.0, "length_penalty": 0.01, "repetition_penalty": 0.3}
    changes = {"reward": penalties, "ppo": {"critic_learning_rate": 5.0e-3}}
    changes = {name: tiny_settings[name] | section for name, section in changes.items()}
    config = TrainConfig.model_validate(tiny_settings | changes)
    training = prepare_training(config, build_setup(resolve(config), torch.device("cpu")))
    assert {name: getattr(training.shaping, name) for name in penalties} == penalties
    rates = [group["lr"] for group in training.trainer.optimizer.param_groups]
    assert rates == [2.0e-4, 2.0e-4, 5.0e-3]  # matrices, vectors, critic


def test_longer_runs_have_larger_evaluations_and_more_of_them(settings: Any, setup: Setup) -> None:
    plans = [planned(settings(updates), setup) for updates in (1, 12, 40, 400, 4000)]
    assert plans[0].responses == 8
    assert plans[0].every >= 1
    for short, long in pairwise(plans[1:]):
        assert long.texts >= min(short.texts, 32)
        assert long.every <= short.every
        assert long.share <= 1.01 * SHARE
    assert plans[-1] == EvalPlan(10, len(setup.texts), setup.heldout.batch_size, plans[-1].share)


def test_what_is_written_stays_and_a_run_that_goes_on_keeps_its_plan(settings: Any, setup: Setup) -> None:
    written = planned(settings(40, every=7, max_documents=5), setup)
    assert (written.every, written.texts) == (7, len(setup.texts))  # setup has drawn them already
    before = EvalPlan(20, 9, 11, 0.15)
    assert planned(settings(400), setup, before) == before
    assert planned(settings(400, every=3), setup, before) == replace(before, every=3)
