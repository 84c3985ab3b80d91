"""One line of `rlhf-kl doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["fine", "doubtful", "fatal"]


class Finding(NamedTuple):
    """Level, topic, result of a check, and advice."""

    level: Level
    topic: str
    text: str
    change: str = ""
