"""Model of the change of a policy's distance from its reference in one update, for `AdaptiveKL`."""

from __future__ import annotations

from typing import NamedTuple


class Situation(NamedTuple):
    """The start of a policy update."""

    distance: float  # x = sqrt(KL/target)
    step: float  # of x in the update before
    log_coef: float


class StepModel(NamedTuple):
    """Constants of step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + log(beta_k / b)), and of learning a and b.

    `scripts/fit_adaptive.py` fits them to recorded runs, with whole plants held out.
    """

    momentum: float = 0.4  # m
    distance_power: float = 1.5  # s
    noise: float = 0.25  # of a step measured at the rollout's own states, in paces
    wander: float = 0.125  # share of the belief that moves to either neighbour on the grid of log b every update
    pace_spread: float = 0.5  # of log a around its first guess
    tails: float = 8.0  # degrees of freedom of Student's t: an outlier has little weight
