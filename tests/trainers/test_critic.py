"""A value function on frozen features: fitted after the policy's epochs, and of no influence on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_kl.distributed import Ranks
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.trainers.critic import fit_critic
from rlhf_kl.trainers.optim import adamw

Make = Callable[..., Any]


def weights(module: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def with_critic(make_trainer: Make, new_model: Make, **sections: Any) -> Any:
    """A trainer whose value function reads features of the reference."""
    critic = FeatureCritic(16, mean=0.0, scale=1.0, seed=0)
    policy = new_model(seed=3, spread=0.1)
    return make_trainer(policy=policy, critic=critic, **sections)


def test_a_critic_is_fitted_after_its_values_were_used(make_trainer: Make, new_model: Make) -> None:
    """The first policy step is the same whatever the critic then learns: no advantage knows its own return."""
    policies = []
    for rate in (1e-3, 1e-1):
        trainer = with_critic(make_trainer, new_model, ppo={"critic_learning_rate": rate})
        before = weights(trainer.model.critic)
        trainer.update(1)
        assert not torch.equal(weights(trainer.model.critic), before)
        policies.append(weights(trainer.model.policy.module))
    assert torch.equal(*policies)


def test_a_warm_up_trains_the_critic_only(make_trainer: Make, new_model: Make) -> None:
    trainer = with_critic(make_trainer, new_model, ppo={"value_warmup": 1})
    policy, value = weights(trainer.model.policy.module), weights(trainer.model.critic)
    row = trainer.update(1).stats.row
    assert row["policy/epochs"] == 0
    assert math.isnan(row["policy/logratio_first_max"])  # no pass of the policy
    assert math.isfinite(row["value/loss"])
    assert torch.equal(weights(trainer.model.policy.module), policy)
    assert not torch.equal(weights(trainer.model.critic), value)
    trainer.update(2)
    assert not torch.equal(weights(trainer.model.policy.module), policy)


def test_the_ceiling_cuts_the_policy_and_not_its_critic(make_trainer: Make, new_model: Make) -> None:
    """The critic of a run whose every update is cut to next to nothing still learns."""
    kl = {"target": 1e-7, "ceiling": {"value": 2e-7, "action": "backtrack"}}  # beta is constant
    trainer = with_critic(make_trainer, new_model, kl=kl, ppo={"learning_rate": 0.1})
    value = weights(trainer.model.critic)
    assert trainer.update(1).ceiling.factor < 0.1
    free = with_critic(make_trainer, new_model, ppo={"learning_rate": 0.1})
    free.update(1)
    assert torch.equal(weights(trainer.model.critic), weights(free.model.critic))
    assert not torch.equal(weights(trainer.model.critic), value)


# ---- fitting ----


def fit(critic: FeatureCritic, features: Tensor, returns: Tensor, epochs: int = 1, step: int = 1) -> tuple[float, bool]:
    optimizer = adamw(torch.nn.ModuleDict({"critic": critic}), 0.0, 0.0, critic, 1e-2)
    return fit_critic(critic, optimizer, features, returns, epochs=epochs, seed=0, step=step, ranks=Ranks())


def test_the_loss_is_that_of_before_the_fit() -> None:
    """A critic starts at its mean: every return of 3 is 2 away from 1, which is 4 scales of 0.5, squared."""
    critic = FeatureCritic(4, mean=1.0, scale=0.5, seed=0)
    features = torch.zeros(3, 4)  # fewer than minibatches: one of them is empty
    assert fit(critic, features, torch.full((3,), 3.0), epochs=0) == (0.0, True)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    loss, finite = fit_critic(
        critic, optimizer, features, torch.full((3,), 3.0), epochs=2, seed=0, step=1, ranks=Ranks()
    )
    assert (loss, finite) == (pytest.approx(16.0), True)


def test_a_return_that_is_not_finite_is_said_and_leaves_the_critic_whole() -> None:
    critic = FeatureCritic(4, mean=0.0, scale=1.0, seed=0)
    before = weights(critic)
    noise = torch.Generator().manual_seed(0)
    features, returns = torch.randn(8, 4, generator=noise), torch.randn(8, generator=noise)
    returns[3] = torch.nan
    loss, finite = fit(critic, features, returns)
    assert math.isnan(loss)
    assert not finite
    assert bool(torch.isfinite(weights(critic)).all())
    assert not torch.equal(weights(critic), before)  # the other minibatches count


def test_a_fit_depends_on_seed_and_step_alone() -> None:
    noise = torch.Generator().manual_seed(0)
    features, returns = torch.randn(64, 4, generator=noise), torch.randn(64, generator=noise)
    critics = [FeatureCritic(4, mean=0.0, scale=1.0, seed=0) for _ in range(3)]
    for critic, step in zip(critics, (1, 1, 2), strict=True):
        torch.manual_seed(step)
        fit(critic, features, returns, epochs=3, step=step)
    assert torch.equal(weights(critics[0]), weights(critics[1]))
    assert not torch.equal(weights(critics[0]), weights(critics[2]))


def test_it_starts_at_the_mean_of_the_reference() -> None:
    critic = FeatureCritic(6, mean=-1.5, scale=2.0, seed=0)
    assert critic(torch.randn(9, 6)).tolist() == [-1.5] * 9


def test_it_explains_what_least_squares_explains() -> None:
    """On returns that are linear in the features but for noise, beside numpy's solution, in any unit of score."""
    noise = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 20, generator=noise)
    signal = features @ torch.randn(20, generator=noise)
    returns = 100 + 30 * (signal + torch.randn(2000, generator=noise))
    design = np.c_[features.numpy(), np.ones(2000)]
    solved = design @ np.linalg.lstsq(design, returns.numpy(), rcond=None)[0]
    critic = FeatureCritic(20, mean=90.0, scale=float(returns.std()), seed=0)
    fit(critic, features, returns, epochs=40)
    error = float((critic(features).detach() - returns).var())
    assert error < 1.1 * float((torch.from_numpy(solved) - returns).var())
