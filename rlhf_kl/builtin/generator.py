"""Writing responses with the grammar of `builtin:reviews`."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, product
from random import Random
from typing import TypeVar

from rlhf_kl.builtin.grammar import (
    CLOSINGS,
    FACTS,
    SHAPES,
    Aspect,
    Predicate,
    aspects_of,
    clause,
    predicates,
    reason_clause,
)

T = TypeVar("T")

MIN_WORDS, MAX_WORDS = 20, 28  # of a written response, punctuation counted
BODY_WORDS = 15  # a body is long enough from here on

_FORM_WEIGHTS = {"plain": 0.4, "intense": 0.24, "pair": 0.2, "negated": 0.06, "other": 0.1}
_WRITABLE: dict[tuple[str, int], tuple[list[float], list[list[Predicate]]]] = {}  # cumulative weights, forms
for _topic in FACTS:
    for _polarity in (-1, 0, 1):
        _fit = {name: [p for p in form if p.polarity == _polarity] for name, form in predicates(_topic).items()}
        _names = [name for name, form in _fit.items() if form]
        _weights = list(accumulate(_FORM_WEIGHTS[name] for name in _names))
        _WRITABLE[_topic, _polarity] = (_weights, [_fit[name] for name in _names])
_FITTING = {
    polarities: [s for s in SHAPES if s.template.count("{") == len(polarities) and s.fits(*polarities)]
    for count in (1, 2)
    for polarities in product((-1, 0, 1), repeat=count)
}


def _pick(rng: Random, options: Sequence[T]) -> T:
    """Like rng.choice, but several times as fast."""
    return options[int(rng.random() * len(options))]


def _draw_polarity(rng: Random, mood: float) -> int:
    draw = rng.random()
    good = 0.34 + 0.23 * mood
    return 1 if draw < good else -1 if draw < 0.68 else 0


def _draw_predicate(rng: Random, topic: str, polarity: int) -> Predicate:
    weights, forms = _WRITABLE[topic, polarity]
    form = bisect_right(weights, rng.random() * weights[-1], hi=len(weights) - 1)
    return _pick(rng, forms[form])


def _write_sentence(rng: Random, aspects: list[Aspect], mood: float) -> tuple[str, float]:
    drawn = [_draw_predicate(rng, a.topic, _draw_polarity(rng, mood)) for a in aspects]
    shape = _pick(rng, _FITTING[tuple([p.polarity for p in drawn])])
    phrase = reason_clause if shape.reason else clause
    phrases = [phrase(aspect, p.text) for aspect, p in zip(aspects, drawn, strict=True)]
    return shape.template.format(*phrases), sum([p.sentiment for p in drawn])


def _write_closing(rng: Random, body: float) -> str:
    neutral = 0.1 if abs(body) >= 1 else 0.6
    polarity = 0 if body == 0 or rng.random() < neutral else 1 if body > 0 else -1
    return _pick(rng, CLOSINGS[polarity])


def _words(text: str) -> int:
    return text.count(" ") + 1


def _write_body(rng: Random, expected: tuple[Aspect, ...], mood: float) -> tuple[str, float]:
    """Sentences of one or two clauses until there are BODY_WORDS words."""
    unused = list(expected)
    sentences, words, total = [], 0, 0.0
    while words < BODY_WORDS:
        aspects = [unused.pop(int(rng.random() * len(unused))) for _ in range(1 + (rng.random() < 0.5))]
        sentence, sentiment = _write_sentence(rng, aspects, mood)
        sentences.append(sentence)
        words += _words(sentence)
        total += sentiment
    return " ".join(sentences), total


def write_response(rng: Random, prompt: str, mood: float) -> str:
    """A response of MIN_WORDS to MAX_WORDS words for the prompt, in the mood given (-1 to 1)."""
    expected = aspects_of(prompt)
    while True:
        body, sentiment = _write_body(rng, expected, mood)
        response = f"{body} {_write_closing(rng, sentiment)}"
        if MIN_WORDS <= _words(response) <= MAX_WORDS:
            return response
