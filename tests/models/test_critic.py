from __future__ import annotations

import numpy as np
import torch

from rlhf_kl.distributed import Ranks
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.trainers.critic import fit_critic
from rlhf_kl.trainers.optim import adamw, set_learning_rate


def fit(critic: FeatureCritic, features: torch.Tensor, returns: torch.Tensor, updates: int = 1) -> tuple[float, bool]:
    optimizer = adamw(critic, 1.0, 0.0, critic, 1e-3)
    set_learning_rate(optimizer, 1.0)  # the policy's: the critic keeps its own
    for step in range(updates):
        result = fit_critic(critic, optimizer, features, returns, epochs=10, seed=0, step=step, ranks=Ranks())
    return result


def test_it_starts_at_the_mean_of_the_reference() -> None:
    critic = FeatureCritic(6, mean=-1.5, scale=2.0, seed=0)
    assert critic(torch.randn(9, 6)).tolist() == [-1.5] * 9


def test_its_start_depends_on_the_seed_alone() -> None:
    first = FeatureCritic(6, 0.0, 1.0, seed=1)
    torch.rand(3)
    assert torch.equal(first.inner.weight, FeatureCritic(6, 0.0, 1.0, seed=1).inner.weight)
    assert not torch.equal(first.inner.weight, FeatureCritic(6, 0.0, 1.0, seed=2).inner.weight)


def test_it_explains_what_least_squares_explains() -> None:
    """On returns that are linear in the features but for noise, beside numpy's solution, in any unit of score."""
    noise = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 20, generator=noise)
    signal = features @ torch.randn(20, generator=noise)
    returns = 100 + 30 * (signal + torch.randn(2000, generator=noise))
    design = np.c_[features.numpy(), np.ones(2000)]
    solved = design @ np.linalg.lstsq(design, returns.numpy(), rcond=None)[0]
    critic = FeatureCritic(20, mean=90.0, scale=float(returns.std()), seed=0)
    fit(critic, features, returns, updates=20)
    error = float((critic(features).detach() - returns).var())
    assert error < 1.1 * float((torch.from_numpy(solved) - returns).var())


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    critic = FeatureCritic(3, 0.0, 1.0, seed=0)
    before = [p.detach().clone() for p in critic.parameters()]
    _, finite = fit(critic, torch.randn(16, 3), torch.full((16,), torch.inf))
    assert not finite
    assert all(torch.equal(p, old) for p, old in zip(critic.parameters(), before, strict=True))


def test_fewer_states_than_minibatches_are_enough() -> None:
    loss, finite = fit(FeatureCritic(3, 0.0, 1.0, seed=0), torch.ones(2, 3), torch.tensor([3.0, 3.0]))
    assert finite
    assert loss < 9.0  # of its first epoch, during which it learns
