"""One line of `rlhf-kl doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["fine", "doubtful", "fatal"]


class Finding(NamedTuple):
    """How bad, about what, what was found, and what to change."""

    level: Level
    topic: str
    text: str
    change: str = ""
