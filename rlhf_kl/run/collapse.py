"""Responses that became one text, and scores without spread: both teach a policy nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_kl.text import read_number

IN_A_ROW = 5  # updates
FEW = 0.2  # share of different texts: at or below it nearly all responses are equal
MANY = 0.4  # above it they are not equal any more


def collapsed(row: Mapping[str, Any]) -> bool:
    """Whether nearly all responses of an update are the same few texts."""
    distinct = read_number(row, "rollout/distinct_responses")
    return distinct is not None and distinct <= FEW


class EqualResponses:
    """Reads the rows of `metrics.jsonl` in order.

    `responses-equal` is raised when it begins, and again only after it has cleared. Equal scores of different texts
    are no alert, since they may end by themselves: one line, once in a run.
    """

    def __init__(self) -> None:
        self._equal = self._flat = 0  # updates in a row
        self._raised = self._told = False

    def __call__(self, row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The alerts and the plain lines that begin with this row."""
        distinct = read_number(row, "rollout/distinct_responses")
        if distinct is None:
            return [], []
        equal = collapsed(row)
        self._equal = self._equal + 1 if equal else 0
        self._flat = self._flat + 1 if _without_spread(row) and not equal else 0
        self._raised = self._raised and distinct <= MANY
        alerts, lines = [], []
        if self._equal >= IN_A_ROW and not self._raised:
            self._raised = True
            alerts.append(
                f"responses-equal: for {IN_A_ROW} updates nearly all responses have been the same text, whatever the "
                f"prompt (last: {distinct:.0%} different texts; samples.jsonl has examples). Use a reward whose "
                "optimum is not this text, a lower kl.target, or prompts that end where the model's training texts "
                "go on"
            )
        if self._flat >= IN_A_ROW and not self._told:
            self._told = True
            lines.append(
                f"for {IN_A_ROW} updates all responses have had the same score ({row['objective/scores']:.3g}), "
                "although their texts differ: the policy learns nothing from it"
            )
        return alerts, lines


def _without_spread(row: Mapping[str, Any]) -> bool:
    spread, mean = read_number(row, "objective/scores_std"), read_number(row, "objective/scores")
    return spread is not None and mean is not None and spread <= 1e-6 * (1 + abs(mean))  # rounding of equal floats
