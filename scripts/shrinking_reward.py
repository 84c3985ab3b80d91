"""A reward that loses its spread in the middle of a run, for `bench_control.py --rows stress-shrinking`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_kl.builtin.world import gold_scores


class ShrinkingReward:
    """The built-in world's true score; after so many responses all scores are 20 times closer to their usual mean."""

    def __init__(self, responses: int = 1024 + 44 * 64, factor: float = 0.05) -> None:
        """`responses` that are scored in full: the reference samples, and 44 updates of 64."""
        self.left, self.factor = responses, factor

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score per response."""
        scores = gold_scores(prompts, responses)
        scale = self.factor if self.left <= 0 else 1.0
        self.left -= len(responses)
        return [scale * score for score in scores]

    def state_dict(self) -> dict[str, Any]:
        """How many responses are left, so that evaluations do not count."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.left = int(state["left"])
