"""A test over the whole run: were tokens sampled from the policy that the trainer computes?

A sampled token's log-prob plus the entropy is 0 on average, whatever came before it; so is its log-ratio to the
reference minus the exact KL. Their sums over a run are martingales. Sampling at another
temperature or from a cut-off distribution (top-k, top-p) shifts the first from the first update on; sampling from other
weights, such as an older policy's, shifts the second as the policy leaves its reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_kl.text import read_number

FALSE_ALARM = 5e-4  # at most, for each of the two sums, in a run of any length
SETTLING = 100.0  # nats squared: at this variance the bound is tightest, relative to the noise
ROUNDING = 1e-3  # nats per token: largest difference of two passes over one text
NEGLIGIBLE = 0.01  # of a token's standard deviation: a shift without an alarm, as from bfloat16

FIGURES = {
    "policy/logprob_gap": "their log-prob is {gap:+.3g} nats off the policy's distribution",
    "kl/k1_gap": "their log-ratio to the reference is {gap:+.3g} nats off the exact KL",
}


class GapSum(NamedTuple):
    """Sums of one figure over all updates so far."""

    total: float = 0.0  # nats
    variance: float = 0.0  # nats squared
    tokens: float = 0.0

    def add(self, row: Mapping[str, Any], key: str) -> GapSum:
        """The sum with this row's tokens; unchanged if the row lacks a figure."""
        gap, stderr, tokens = (read_number(row, name) for name in (key, f"{key}_stderr", "rollout/tokens"))
        if gap is None or stderr is None or tokens is None:
            return self
        return GapSum(self.total + gap * tokens, self.variance + (stderr * tokens) ** 2, self.tokens + tokens)

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.tokens

    @property
    def stderr(self) -> float:
        """Of the mean, nats per token."""
        return math.sqrt(self.variance) / self.tokens

    @property
    def shifted(self) -> bool:
        """Whether the sum is larger than sampling from the policy itself would ever give in a run.

        The normal mixture bound holds for all updates at once (Robbins 1970; Howard et al. 2021, 1810.08240).
        """
        variance = self.variance + self.tokens * ROUNDING**2
        sure = variance + SETTLING
        bound = math.sqrt(sure * math.log(sure / SETTLING / FALSE_ALARM**2))
        return abs(self.total) > bound + NEGLIGIBLE * math.sqrt(variance * self.tokens)
