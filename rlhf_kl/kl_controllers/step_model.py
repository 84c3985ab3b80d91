"""How a policy's distance from its reference moves in one update, as `AdaptiveKL` models it."""

from __future__ import annotations

from typing import NamedTuple


class Situation(NamedTuple):
    """Where a policy update begins."""

    distance: float  # x = sqrt(KL/target)
    step: float  # of x in the update before
    log_coef: float


class StepModel(NamedTuple):
    """Constants of step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + r log(beta_k / b))."""

    momentum: float  # m
    distance_power: float  # s
    coef_power: float  # r
