"""Whether KL brings score: the share of the KL that the gain in score needs, and an alert if it is small."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers.tilt import least_kl
from rlhf_kl.text import format_number, read_number

WINDOW = 8  # updates
LITTLE = 0.1  # of the KL: by the Gaussian law a third of the score that it could have bought
CLEARED = 1.5  # times that
THERE = 0.5  # of the target: a KL below it may still rise
NO_TARGET = 0.1  # nats per token, in place of a target
SURE = 2.0  # standard errors of the score


class _Measured(NamedTuple):
    kl: float  # nats per response
    target_kl: float  # nats in the unit of the target
    gain: float  # mean shaped score less the reference's


class KLBought:
    """`share` is the figure `kl/bought` of a row; called with the rows of `metrics.jsonl` in order, it alerts.

    A gain in score needs some KL: the least KL of any policy with that gain, from the reference's samples. KL beyond
    it brought no score, as in a policy that follows the noise of its gradient. The alert is raised when it begins, and
    again only after it has cleared.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        curve: Sequence[Mapping[str, float]],
        mean: float,
        mean_stderr: float,
        spread: float,
        learning_rate: float,
        target: float | None,
        warns: bool = True,
    ) -> None:
        """`curve`: the tilt of the reference's samples, empty where unknown; the others describe its shaped scores.

        `target` in nats per `kl.unit`, None without one. `warns`: False if the policy is not the reference at the
        start, since then it begins with a KL.
        """
        self._config, self._curve, self._learning_rate = config, curve, learning_rate
        self._mean, self._mean_stderr, self._spread = mean, mean_stderr, spread
        self._unit = config.kl.unit if target is not None else "token"
        self._there = THERE * (target if target is not None else NO_TARGET)
        self._recent: deque[_Measured] = deque(maxlen=WINDOW)
        self._warns, self._raised = warns, False

    def share(self, row: Mapping[str, Any]) -> float | None:
        """Share of an update's KL that its gain in score needs, in [0, 1]; a lower bound beyond the samples.

        None without samples or measurements, and if the noise of the score could explain so small a KL.
        """
        measured = self._measured(row)
        if measured is None or measured.kl <= least_kl(self._curve, SURE * self._stderr(1)):
            return None
        return min(1.0, least_kl(self._curve, measured.gain) / measured.kl)

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        """The alert that begins with this row, if any."""
        measured = self._measured(row)
        if measured is None or not self._warns:
            return []
        self._recent.append(measured)
        if len(self._recent) < WINDOW or min(update.target_kl for update in self._recent) < self._there:
            return []
        kl, gain = (fmean(getattr(update, name) for update in self._recent) for name in ("kl", "gain"))
        if least_kl(self._curve, gain) > CLEARED * LITTLE * kl:
            self._raised = False
        most = gain + SURE * self._stderr(WINDOW)  # noise of the batches is no reason to warn
        share, known = least_kl(self._curve, most) / kl, most <= self._curve[-1]["gain"]
        if self._raised or not known or share >= LITTLE:
            return []
        self._raised = True
        return [
            f"kl-not-bought: over the last {WINDOW} updates the gain in score needs at most {share:.0%} of the KL "
            f"({kl:.3g} nats per response); the rest brought no score: the policy follows noise. {self._mend(row)}"
        ]

    def _measured(self, row: Mapping[str, Any]) -> _Measured | None:
        kl, target_kl = read_number(row, "kl/sequence"), read_number(row, f"kl/{self._unit}")
        score = read_number(row, "objective/scores_shaped")
        if kl is None or target_kl is None or score is None or not self._curve:
            return None
        return _Measured(kl, target_kl, score - self._mean)

    def _stderr(self, updates: int) -> float:
        """Standard error of the gain over some updates: that of their batches, and that of the reference's mean.

        Prompts are the independent draws: several responses to one prompt count once.
        """
        rollout = self._config.rollout
        draws = updates * rollout.batch_size / rollout.samples_per_prompt
        return math.hypot(self._spread / math.sqrt(draws), self._mean_stderr)

    def _mend(self, row: Mapping[str, Any]) -> str:
        """Advice, by the source of the noise."""
        rate, batch = self._learning_rate, self._config.rollout.batch_size
        less_noise = (
            f"lower ppo.learning_rate ({rate:.3g}, say to {rate / 3:.1g}) or raise rollout.batch_size ({batch}, "
            f"say to {4 * batch}); if neither helps, the policy may be unable to learn this reward"
        )
        penalty = self._penalty_spread(row)
        if penalty <= self._spread:
            return less_noise[0].upper() + less_noise[1:]
        noise, score = format_number(penalty, 2), format_number(self._spread, 2)
        return (
            "Set kl.placement: rao_blackwell with kl.estimator: exact, since beta times k1 varies by "
            f"{noise} between responses, the score by {score}; or {less_noise}"
        )

    def _penalty_spread(self, row: Mapping[str, Any]) -> float:
        """Standard deviation between responses of the penalty that k1 in the reward makes; 0 where there is none."""
        if self._config.kl.placement != "reward" or self._config.kl.estimator != "k1":
            return 0.0
        figures = [
            read_number(row, key) for key in ("kl/k1_stderr", "rollout/tokens", "rollout/response_length", "kl/coef")
        ]
        stderr, tokens, length, coef = (figure or 0.0 for figure in figures)
        # The error of a mean per token, taken between responses, is their spread * sqrt(responses) / tokens.
        return coef * stderr * math.sqrt(tokens * length)
