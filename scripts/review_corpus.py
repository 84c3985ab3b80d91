"""Writes texts, prompts and preference pairs with the grammar of `builtin:reviews`, all from one seed.

`make_world.py` makes the files of the built-in worlds with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, permutations, product
from math import exp
from random import Random
from typing import TypeVar

from rlhf_kl.builtin.gold import gold_score
from rlhf_kl.builtin.grammar import (
    CLOSINGS,
    COMPARED,
    EMPHASIS,
    FACTS,
    INTENSIFIERS,
    NEGATED,
    PLACES,
    SHAPES,
    Aspect,
    Predicate,
    aspects_of,
    clause,
    expand,
    reason_clause,
    words_of,
)

T = TypeVar("T")

MIN_WORDS, MAX_WORDS = 20, 28  # of a written response, punctuation counted
BODY_WORDS = 15  # a body is long enough from here on
HELDOUT_SHARE = 0.1  # of the openings; every held-out part draws its prompts from these and only these
NOISE_SCALE = 0.3  # gold units per logit of the labeller
FLIP_SHARE = 0.03  # of the labels are turned round
CORRUPTED_SHARE = 0.25  # pairs of which one response is damaged


# --- prompts -----------------------------------------------------------------------------------------------

_WHO = ("We", "I", "My wife and I", "My family", "My friends and I", "Our group", "My sister and I", "My parents")
_WHEN = [
    *expand("last {weekend|summer|winter|month}"),
    *expand("in {May|June|October}"),
    *expand("on a {Friday|Sunday|rainy day}"),
    "after a long walk",
    "before the concert",
]
_NAMES = expand("{harbour|station|castle|river|market|bridge|lake|forest|hill|village|mill|tower}")
_KNOWN_FOR = {name: ("view", "staff", "garden", "breakfast")[i % 4] for i, name in enumerate(_NAMES)}
_VERBS = {
    "lodging": ("stayed at", "booked a room at", "spent a night at"),
    "eatery": ("ate at", "booked a table at", "spent a day at"),
}


@cache
def openings() -> tuple[str, ...]:
    """Every prompt of the grammar, about 40 000, in a fixed order."""
    prompts = []
    for place, verbs in _VERBS.items():
        for who, verb, name, kind, when in product(_WHO, verbs, _NAMES, PLACES[place], _WHEN):
            lower = who if who == "I" else who[0].lower() + who[1:]
            prompts.append(f"{who} {verb} the {name} {kind} {when} .")
            prompts.append(f"{when[0].upper() + when[1:]} {lower} {verb} the {name} {kind} .")
    return tuple(prompts)


def known_for(prompt: str) -> str:
    """What the place in a prompt is known for, an aspect's noun: it follows from the place's name. "" without one."""
    return next((_KNOWN_FOR[word] for word in prompt.split() if word in _KNOWN_FOR), "")


# --- responses ---------------------------------------------------------------------------------------------


def predicates(topic: str) -> dict[str, list[Predicate]]:
    """Every predicate of a topic, by form."""
    words = words_of(topic)
    return {
        "plain": [Predicate(word, worth) for word, worth in words.items()],
        "intense": [
            Predicate(f"{very} {word}", worth, EMPHASIS if worth > 0 else -EMPHASIS)
            for word, worth in words.items()
            if worth
            for very in INTENSIFIERS[abs(worth)]
        ],
        "pair": [
            Predicate(f"{one} and {two}", (words[one] + words[two]) / 2)
            for one, two in permutations(words, 2)
            if words[one] * words[two] > 0 or words[one] == words[two]
        ],
        "negated": [Predicate(text, worth) for text, worth in NEGATED.items()],
        "other": [Predicate(text, worth) for text, worth in COMPARED.items()]
        + [Predicate(fact, 0.0) for fact in FACTS[topic].split("|")],
    }


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


# --- the corpus --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusSizes:
    train_texts: int = 20_000
    heldout_texts: int = 400
    prompts: int = 4_000
    heldout_prompts: int = 256
    pairs: int = 8_000
    heldout_pairs: int = 500


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Corpus:
    """No opening of a held-out part occurs in a training part."""

    train_texts: list[str]  # prompt + " " + response
    heldout_texts: list[str]
    prompts: list[str]  # distinct
    heldout_prompts: list[str]
    pairs: list[Pair]
    heldout_pairs: list[Pair]


def write_corpus(seed: int, sizes: CorpusSizes) -> Corpus:
    """Write the whole corpus; a part depends on the seed and its own size only."""
    pool = list(openings())
    _stream(seed, "split").shuffle(pool)
    cut = int(HELDOUT_SHARE * len(pool))
    heldout, train = pool[:cut], pool[cut:]
    return Corpus(
        train_texts=_texts(_stream(seed, "train_texts"), train, sizes.train_texts),
        heldout_texts=_texts(_stream(seed, "heldout_texts"), heldout, sizes.heldout_texts),
        prompts=train[: sizes.prompts],
        heldout_prompts=heldout[: sizes.heldout_prompts],
        pairs=_pairs(_stream(seed, "pairs"), train, sizes.pairs),
        heldout_pairs=_pairs(_stream(seed, "heldout_pairs"), heldout, sizes.heldout_pairs),
    )


def _stream(seed: int, part: str) -> Random:
    return Random(f"{seed}/{part}")  # a string seed does not depend on PYTHONHASHSEED


def _draw_response(rng: Random, prompt: str) -> str:
    return write_response(rng, prompt, rng.uniform(-1, 1))


def _texts(rng: Random, pool: list[str], size: int) -> list[str]:
    texts = []
    for _ in range(size):
        prompt = rng.choice(pool)
        texts.append(f"{prompt} {_draw_response(rng, prompt)}")
    return texts


def _pairs(rng: Random, pool: list[str], size: int) -> list[Pair]:
    pairs: list[Pair] = []
    while len(pairs) < size:
        prompt = rng.choice(pool)
        one, two = _draw_response(rng, prompt), _draw_response(rng, prompt)
        if rng.random() < CORRUPTED_SHARE:
            two = corrupt(rng, two)
        if one != two:
            pairs.append(_label(rng, prompt, one, two))
    return pairs


def _label(rng: Random, prompt: str, one: str, two: str) -> Pair:
    """Bradley-Terry: P(one is chosen) = sigmoid(gold difference / NOISE_SCALE), then a few flips."""
    margin = (gold_score(prompt, one) - gold_score(prompt, two)) / NOISE_SCALE
    first = rng.random() < 1 / (1 + exp(-margin))
    if rng.random() < FLIP_SHARE:
        first = not first
    return Pair(prompt, one, two) if first else Pair(prompt, two, one)


def corrupt(rng: Random, response: str) -> str:
    """Damage a response in one of five ways; no damage makes it more than one word longer."""
    damage = rng.choice((_drop_word, _swap_words, _double_word, _cut_off, _repeat_sentence))
    return " ".join(damage(rng, response.split(" ")))


def _drop_word(rng: Random, words: list[str]) -> list[str]:
    at = rng.randrange(len(words))
    return words[:at] + words[at + 1 :]


def _swap_words(rng: Random, words: list[str]) -> list[str]:
    at = rng.randrange(len(words) - 1)
    return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]


def _double_word(rng: Random, words: list[str]) -> list[str]:
    at = rng.randrange(len(words))
    return words[: at + 1] + words[at:]


def _cut_off(rng: Random, words: list[str]) -> list[str]:
    return words[: rng.randrange(len(words) // 2, len(words))]


def _repeat_sentence(rng: Random, words: list[str]) -> list[str]:
    """Write one sentence again over its successor."""
    sentences = " ".join(words).removesuffix(" .").split(" . ")
    at = rng.randrange(len(sentences) - 1)
    sentences[at + 1] = sentences[at]
    return [*" . ".join(sentences).split(" "), "."]
