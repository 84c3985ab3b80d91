"""Rewards of `bench_control.py --rows stress` and `scale_arms.py`: one that loses its spread, four for TinyStories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf_kl.builtin.gold import gold_scores

GLAD = {
    "glad", "happily", "happy", "hug", "hugged", "joy", "laugh", "laughed", "love", "loved",
    "proud", "smile", "smiled", "smiling", "thankful",
}  # fmt: skip
SENTENCE_END = re.compile(r"[.!?]+")


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


def glad(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Glad words in 100 words, a rare thing: most responses have none or one."""
    del prompts
    words = [re.findall(r"[a-z]+", response.lower()) for response in responses]
    return [100.0 * sum(word in GLAD for word in row) / max(10, len(row)) for row in words]


def brief(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """How few words the sentences have on average: every token before a full stop moves it a little."""
    del prompts
    return [-len(response.split()) / max(1, len(SENTENCE_END.findall(response))) for response in responses]


def spoken(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Percent of the characters that stand in quotation marks."""
    del prompts
    quoted = [sum(map(len, response.split('"')[1::2])) for response in responses]
    return [100.0 * inside / max(1, len(response)) for inside, response in zip(quoted, responses, strict=True)]


def easy(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """How few letters the words have on average; a text without words has 20."""
    del prompts
    words = [re.findall(r"[a-z]+", response.lower()) or ["-" * 20] for response in responses]
    return [-sum(map(len, row)) / len(row) for row in words]
