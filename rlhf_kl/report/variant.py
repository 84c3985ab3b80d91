"""A variant of a comparison: runs that differ only in their seed, and their spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers import adjusts
from rlhf_kl.report.run import RunFigures, RunResult, Series


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed."""

    name: str
    family: str  # variants that differ only in their (starting) beta
    runs: dict[int, RunResult]  # by seed

    @property
    def config(self) -> TrainConfig:
        return next(iter(self.runs.values())).config

    @cached_property
    def figures(self) -> dict[int, RunFigures]:
        """By seed."""
        return {seed: run.figures for seed, run in self.runs.items()}

    def values(self, name: str) -> list[float]:
        """A figure of all seeds that have it."""
        return [value for figures in self.figures.values() if (value := getattr(figures, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Mean over seeds; None if a seed lacks the figure."""
        values = self.values(name)
        return fmean(values) if values and len(values) == len(self.runs) else None

    def sd(self, name: str) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        values = self.values(name)
        if len(values) < 2 or len(values) < len(self.runs):
            return None
        return stdev(values) if all(map(math.isfinite, values)) else None

    @property
    def held(self) -> bool | None:
        """Whether the KL of every seed stayed at its target; None if a run is too short to judge."""
        verdicts = [figures.held for figures in self.figures.values()]
        return None if None in verdicts else all(verdicts)

    @property
    def is_controlled(self) -> bool:
        """Whether beta depends on the KL."""
        return adjusts(self.config.kl.controller.kind)

    @property
    def ceiling(self) -> tuple[float, str] | None:
        """In nats, and what happens there."""
        kl = self.config.kl
        return None if kl.ceiling is None or kl.ceiling_value is None else (kl.ceiling_value, kl.ceiling.action)

    @property
    def constant_coef(self) -> float | None:
        """The mean beta if it is constant in every seed, else None."""
        coefs = [coef for run in self.runs.values() if (coef := run.constant_coef) is not None]
        return fmean(coefs) if coefs and len(coefs) == len(self.runs) else None

    def series(self, key: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Updates, mean, and mean -+ one standard deviation over seeds, for updates that all seeds have."""
        return over_seeds([run.series(key) for run in self.runs.values()])


def over_seeds(series: Sequence[Series]) -> tuple[list[float], list[float], list[float], list[float]]:
    """x, mean, and mean -+ one standard deviation of curves at the x that all of them have."""
    tables = [dict(zip(*one, strict=True)) for one in series]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    columns = [[table[x] for table in tables] for x in shared]
    means = [fmean(column) for column in columns]
    spread = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
    low = [m - s for m, s in zip(means, spread, strict=True)]
    high = [m + s for m, s in zip(means, spread, strict=True)]
    return shared, means, low, high
