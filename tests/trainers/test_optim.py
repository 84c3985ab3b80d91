from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_kl.trainers import optim
from rlhf_kl.trainers.optim import adamw, lr_factor, set_learning_rate, trainable, usual_learning_rate


@pytest.mark.parametrize(
    ("schedule", "progress", "warmup", "factor"),
    [
        ("constant", 0.0, 0.0, 1.0),
        ("constant", 0.9, 0.1, 1.0),
        ("constant", 0.05, 0.1, 0.5),
        ("linear", 0.0, 0.0, 1.0),
        ("linear", 0.25, 0.0, 0.75),
        ("linear", 1.0, 0.0, 0.0),
        ("linear", 0.6, 0.2, 0.5),
        ("cosine", 0.0, 0.0, 1.0),
        ("cosine", 0.5, 0.0, 0.5),
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
    adamw(net, learning_rate=0.1, weight_decay=0.5).step()
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


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_frozen_tensor_is_not_trained() -> None:
    net = model()
    net[0].requires_grad_(False)
    before = net[0].weight.detach().clone()
    train(net, adamw(net, 0.1, 0.5), range(2))
    assert torch.equal(net[0].weight, before)
    assert len(trainable([net, net])) == 4


def test_the_rate_is_that_of_all_groups() -> None:
    optimizer = adamw(model(), 0.01, 0.1)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


# Learning rates of PPO in published code and papers: parameters, rate, adapter.
IN_USE = [
    (890_208, 2.0e-4, False),  # the built-in policy, to which the line is fixed
    (656_000, 5.0e-4, False),  # TinyStories-656K
    (124e6, 1.41e-5, False),  # TRL's GPT-2 on IMDB
    (1e9, 3e-6, False),  # Pythia on TL;DR (Huang et al. 2024)
    (7e9, 1e-6, False),  # verl
    (7e9, 5e-7, False),  # OpenRLHF, MOSS-RLHF
    (8e9, 3e-7, False),  # Tulu 3
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
