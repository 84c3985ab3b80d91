"""The truth of `builtin:reviews`: scorers that read with the grammar, unlike a learned reward model."""

from collections.abc import Sequence
from math import tanh

from rlhf_kl.builtin.grammar import EMPHASIS, aspects_of, closing_agrees
from rlhf_kl.builtin.parser import ParsedSentence, parse_response

CAP = 3.0  # praise and blame saturate here
LOWEST = -4.0
MALFORMED = 1.0
WORDS_PER_FAULT = 8  # a malformed run of words costs MALFORMED for each sentence's worth of them
REPEATED = 1.0
WRONG_CLOSING = 1.0
NO_CLOSING = 0.5


def gold_score(prompt: str, response: str) -> float:
    """How good a response truly is, from -4 to 3, in units of one strong word ("wonderful" is 1).

    The sentiments of the well-formed sentences add up and saturate smoothly at +-3. Faults are subtracted
    after that, so no praise pays for them: a malformed sentence (more if it is long), an aspect or sentence
    that was there before, a closing that is missing, out of place or at odds with the body. A sentence about
    something the place in the prompt does not have earns nothing. Of intensifiers the first one counts, and
    only where some sentence has none. An empty response is worth -4. Responses straight from the grammar
    have a mean of about 0 and a standard deviation of about 1.5.
    """
    sentences = parse_response(response)
    if not sentences:
        return LOWEST
    expected = {aspect.noun for aspect in aspects_of(prompt)}
    body = [s for s in _first_mentions(sentences) if expected.issuperset(s.aspects)]
    total = sum(s.sentiment for s in body)
    last = sentences[-1]
    closing = last.sentiment if last.closing and closing_agrees(last.sentiment, total) else 0.0
    worth = CAP * tanh((total + _emphasis(body) + closing) / CAP)
    return max(LOWEST, worth - _faults(sentences, total))


def gold_scores(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """`gold_score` for a batch."""
    return [gold_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def mentions(prompts: Sequence[str], responses: Sequence[str], known_for: Sequence[str]) -> list[float]:  # noqa: ARG001  every reward function gets prompts
    """A checkable reward: 1 where a well-formed sentence is about the noun in the column `known_for`, else 0."""
    return [
        float(any(noun in sentence.aspects for sentence in parse_response(response) if sentence.wellformed))
        for response, noun in zip(responses, known_for, strict=True)
    ]


def _first_mentions(sentences: list[ParsedSentence]) -> list[ParsedSentence]:
    """The well-formed body sentences, all of whose aspects are new."""
    seen: set[str] = set()
    fresh = []
    for sentence in sentences:
        if sentence.aspects and seen.isdisjoint(sentence.aspects):
            fresh.append(sentence)
        seen.update(sentence.aspects)
    return fresh


def _emphasis(body: list[ParsedSentence]) -> float:
    loud = [s.emphasis for s in body if s.emphasis]
    if not loud or len(loud) == len(body):
        return 0.0
    return max(-EMPHASIS, min(EMPHASIS, loud[0]))


def _faults(sentences: list[ParsedSentence], body: float) -> float:
    malformed = sum(max(1.0, len(s.text.split()) / WORDS_PER_FAULT) for s in sentences if not s.wellformed)
    repeated = sum(1 for s in sentences if s.aspects) - len(_first_mentions(sentences))
    early = sum(1 for s in sentences[:-1] if s.closing)
    last = sentences[-1]
    wrong = early + (last.closing and not closing_agrees(last.sentiment, body))
    missing = not any(s.closing for s in sentences)
    return MALFORMED * malformed + REPEATED * repeated + WRONG_CLOSING * wrong + NO_CLOSING * missing
