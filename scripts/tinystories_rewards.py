"""Two rewards for the stories of TinyStories-656K: a rare word that has to appear, and a length that all can change."""

from __future__ import annotations

import re
from collections.abc import Sequence

GLAD = {
    "glad", "happily", "happy", "hug", "hugged", "joy", "laugh", "laughed", "love", "loved",
    "proud", "smile", "smiled", "smiling", "thankful",
}  # fmt: skip
SENTENCE_END = re.compile(r"[.!?]+")


def glad(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Glad words in 100 words: most responses have none or one."""
    del prompts
    words = [re.findall(r"[a-z]+", response.lower()) for response in responses]
    return [100.0 * sum(word in GLAD for word in row) / max(10, len(row)) for row in words]


def brief(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """How few words the sentences have on average: every token before a full stop moves it a little."""
    del prompts
    return [-len(response.split()) / max(1, len(SENTENCE_END.findall(response))) for response in responses]
