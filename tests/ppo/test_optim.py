from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhf_kl import optim
from rlhf_kl.distributed import Ranks
from rlhf_kl.models.value import FeatureCritic
from rlhf_kl.optim import adamw, fit_critic, lr_factor, supervised_learning_rate, usual_learning_rate
from tests.made import Make, weights


@pytest.mark.parametrize(
    ("schedule", "progress", "warmup", "factor"),
    [
        ("constant", 0.0, 0.0, 1.0),
        ("constant", 0.05, 0.1, 0.5),
        ("linear", 0.25, 0.0, 0.75),
        ("linear", 0.6, 0.2, 0.5),
        ("cosine", 1.0, 0.0, 0.0),
        ("cosine", 1 / 3, 0.0, 0.75),
        ("cosine", 0.1, 0.2, 0.5),
    ],
)
def test_the_learning_rate_over_a_run(schedule: str, progress: float, warmup: float, factor: float) -> None:
    assert lr_factor(schedule, progress, warmup) == pytest.approx(factor, abs=1e-9)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def test_only_matrices_decay() -> None:
    net = model()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = adamw(net, learning_rate=0.1, weight_decay=0.5)
    assert len(optimizer.state) == len(list(net.parameters()))  # all memory is taken before the first gradient
    optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.dim() == 2 else 1.0))


@pytest.mark.parametrize("kernels", [optim.FUSED, ()])
def test_the_first_step_is_that_of_the_formula(kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without history both moments are the gradient's own: rate * g / (|g| + eps), on every path."""
    monkeypatch.setattr(optim, "FUSED", kernels)
    net, critic = model(), nn.Linear(2, 1)
    whole = nn.ModuleList([net, critic])
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for p in whole.parameters():
        p.grad = torch.randn_like(p) * 1e-4  # near eps, so that it shows
    adamw(whole, learning_rate=0.1, weight_decay=0.0, critic=critic, critic_rate=0.3).step()
    for name, p in whole.named_parameters():
        assert p.grad is not None
        rate = 0.3 if name.startswith("1.") else 0.1
        torch.testing.assert_close(p.detach(), before[name] - rate * p.grad / (p.grad.abs() + 1e-5))


# Learning rates of PPO in published code and papers: parameters, rate, adapter.
IN_USE = [
    (890_208, 2.0e-4, False),  # the built-in policy, to which the line is fixed
    (124e6, 1.41e-5, False),  # TRL's GPT-2 on IMDB
    (1e9, 3e-6, False),  # Pythia on TL;DR (Huang et al. 2024)
    (7e9, 1e-6, False),  # verl
    (7e9, 1.4e-5, True),  # StackLLaMA
]


@pytest.mark.parametrize(("parameters", "rate", "adapter"), IN_USE)
def test_rates_in_use_lie_near_it(parameters: float, rate: float, adapter: bool) -> None:
    assert 1 / 3 < usual_learning_rate(int(parameters), adapter=adapter) / rate < 3


def test_it_falls_with_the_size_and_is_ten_times_as_high_for_an_adapter() -> None:
    sizes = [10**n for n in range(3, 12)]
    rates = [usual_learning_rate(size, adapter=False) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert max(rates) == 5e-4
    for size, rate in zip(sizes, rates, strict=True):
        assert usual_learning_rate(size, adapter=True) == pytest.approx(10 * rate, rel=0.05)


def with_critic(make_trainer: Make, **sections: Any) -> Any:
    """A trainer whose value function reads features of the reference."""
    return make_trainer(critic=FeatureCritic(16, mean=0.0, scale=1.0, seed=0), **sections)


def test_a_critic_is_fitted_after_its_values_were_used(make_trainer: Make) -> None:
    """The first policy step is the same whatever the critic then learns: no advantage knows its own return."""
    policies = []
    for rate in (1e-3, 1e-1):
        trainer = with_critic(make_trainer, ppo={"critic_learning_rate": rate})
        before = weights(trainer.model.critic)
        trainer.update(1)
        assert not torch.equal(weights(trainer.model.critic), before)
        policies.append(weights(trainer.model.policy.module))
    assert torch.equal(*policies)


def test_the_ceiling_cuts_the_policy_and_not_its_critic(make_trainer: Make) -> None:
    """The critic of a run whose every update is cut to next to nothing still learns."""
    kl = {"target": 1e-7, "ceiling": {"value": 2e-7, "action": "backtrack"}}  # beta is constant
    trainer = with_critic(make_trainer, kl=kl, ppo={"learning_rate": 0.1})
    value = weights(trainer.model.critic)
    assert trainer.update(1).move.factor < 0.1
    free = with_critic(make_trainer, ppo={"learning_rate": 0.1})
    free.update(1)
    assert torch.equal(weights(trainer.model.critic), weights(free.model.critic))
    assert not torch.equal(weights(trainer.model.critic), value)


def fit(critic: FeatureCritic, x: Tensor, returns: Tensor, epochs: int = 1, step: int = 1, rate: float = 1e-2) -> Any:
    optimizer = adamw(torch.nn.ModuleDict({"critic": critic}), 0.0, 0.0, critic, rate)
    return fit_critic(critic, optimizer, x, returns, epochs=epochs, seed=0, step=step, ranks=Ranks())


def test_the_loss_is_that_of_before_the_fit() -> None:
    """A critic starts at its mean: every return of 3 is 2 away from 1, which is 4 scales of 0.5, squared."""
    critic = FeatureCritic(4, mean=1.0, scale=0.5, seed=0)
    rows = torch.zeros(3, 4), torch.full((3,), 3.0)  # fewer than minibatches: one of them is empty
    assert fit(critic, *rows, epochs=0) == (0.0, True)
    assert fit(critic, *rows, epochs=2, rate=0.0) == (pytest.approx(16.0), True)


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


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_fit_reads_from_the_device_once_at_its_end(epochs: int, reads_of: Make) -> None:
    critic = FeatureCritic(4, mean=0.0, scale=1.0, seed=0)
    assert reads_of(lambda: fit(critic, torch.ones(8, 4), torch.ones(8), epochs)) == ["cpu", "tolist"]


def test_a_fit_depends_on_seed_and_step_alone() -> None:
    noise = torch.Generator().manual_seed(0)
    features, returns = torch.randn(64, 4, generator=noise), torch.randn(64, generator=noise)
    critics = [FeatureCritic(4, mean=0.0, scale=1.0, seed=0) for _ in range(3)]
    for critic, step in zip(critics, (1, 1, 2), strict=True):
        torch.manual_seed(step)
        fit(critic, features, returns, epochs=3, step=step)
    assert torch.equal(weights(critics[0]), weights(critics[1]))
    assert not torch.equal(weights(critics[0]), weights(critics[2]))


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


@pytest.mark.parametrize(
    ("parameters", "new", "adapter", "rate"),
    [
        (124e6, False, False, 2e-5),
        (6e9, False, False, 1e-5),  # Ouyang et al. 2022, appendix C: 9e-6
        (7e9, False, True, 1e-4),
        (0.9e6, True, False, 5e-3),
        (124e6, True, False, 6e-4),  # Brown et al. 2020, table 2.1
        (1e4, True, False, 5e-3),
    ],
)
def test_a_model_that_exists_is_not_trained_like_a_new_one(
    parameters: float, new: bool, adapter: bool, rate: float
) -> None:
    """A rate that fits the built-in model, 5e-3, was once the default for a model of one's own too."""
    assert supervised_learning_rate(int(parameters), new=new, adapter=adapter) == pytest.approx(rate, rel=0.05)
