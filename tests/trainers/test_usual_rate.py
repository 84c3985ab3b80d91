from __future__ import annotations

import pytest

from rlhf_kl.trainers.optim import usual_learning_rate

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


def test_the_built_in_policy_keeps_its_rate() -> None:
    assert usual_learning_rate(890_208, adapter=False) == 2.0e-4
