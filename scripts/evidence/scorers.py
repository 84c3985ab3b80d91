"""Rewards that people write, and scorers that never train beside them.

pip install afinn textstat vaderSentiment
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

HARDEST = 20.0  # school grades; a text without a word is as hard
WORD = re.compile(r"[a-z']+")


@cache
def vader() -> Any:
    """Hutto and Gilbert 2014."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


@cache
def lexicon() -> Any:
    """Nielsen 2011."""
    from afinn import Afinn

    return Afinn()


def words(text: str) -> list[str]:
    """Its words in lower case."""
    return WORD.findall(text.lower())


# ---- rewards


def positive(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """VADER's compound score, -1 to 1."""
    return [vader().polarity_scores(response)["compound"] for response in responses]


def easy(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Readability: 0 less the grade of the Automated Readability Index (Smith and Senter 1967), between 0 and 20."""
    import textstat

    return [
        -min(HARDEST, max(0.0, textstat.automated_readability_index(text))) if words(text) else -HARDEST
        for text in responses
    ]


def plain(prompts: Sequence[str], responses: Sequence[str], most: int = 12) -> list[float]:
    """1 for a response whose first sentence has at most so many words and ends with a full stop, else 0."""
    firsts = [re.match(r"\s*([^.!?\n]*)\.", response) for response in responses]
    return [float(first is not None and 2 < len(first[1].split()) <= most) for first in firsts]


# ---- scorers that never train


def afinn(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """How positive by another lexicon: the sum of AFINN's valences, -5 to 5 for a word."""
    return [lexicon().score(response) for response in responses]


def overlap(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Share of the prompt's words of four letters or more that the response takes up, by their first four letters."""
    shares = []
    for prompt, response in zip(prompts, responses, strict=True):
        asked = {word[:4] for word in words(prompt) if len(word) > 3}
        taken = {word[:4] for word in words(response)}
        shares.append(len(asked & taken) / max(1, len(asked)))
    return shares


def distinct(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Share of different words among the words of a response."""
    found = list(map(words, responses))
    return [len(set(row)) / max(1, len(row)) for row in found]
