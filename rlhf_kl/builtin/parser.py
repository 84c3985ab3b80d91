"""Reading responses with the grammar of `builtin:reviews`."""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from rlhf_kl.builtin.grammar import (
    ADJECTIVES,
    ASPECTS,
    CLOSINGS,
    COMPARED,
    EMPHASIS,
    FACTS,
    INTENSIFIERS,
    NEGATED,
    SHAPES,
    Predicate,
    Shape,
    clause,
    reason_clause,
    words_of,
)

CLOSING_WORTH = 0.5


def _readable(topic: str) -> dict[str, Predicate]:
    """Every predicate that is grammatical about a topic.

    Words that do not fit it ("tasty" of a view) are worth nothing there, and so is a pair of praise and blame.
    """
    fitting = words_of(topic)
    words = [word for source in ADJECTIVES.values() for adjectives in source.values() for word in adjectives.split()]
    readable = {word: Predicate(word, fitting.get(word, 0.0)) for word in words}
    for word in words:
        worth = fitting.get(word, 0.0)
        for very in sum(INTENSIFIERS.values(), ()):
            readable[f"{very} {word}"] = Predicate(f"{very} {word}", worth, EMPHASIS * ((worth > 0) - (worth < 0)))
    for one, two in permutations(words, 2):
        worths = fitting.get(one, 0.0), fitting.get(two, 0.0)
        agree = min(worths) > 0 or max(worths) < 0
        readable[f"{one} and {two}"] = Predicate(f"{one} and {two}", sum(worths) / 2 if agree else 0.0)
    for text, worth in (NEGATED | COMPARED).items():
        readable[text] = Predicate(text, worth)
    for facts in FACTS.values():
        readable |= {fact: Predicate(fact, 0.0) for fact in facts.split("|")}
    return readable


_READABLE = {topic: _readable(topic) for topic in FACTS}  # topic -> text -> predicate
_READERS: dict[str, list[tuple[re.Pattern[str], Shape]]] = {}  # by first word
for _shape in SHAPES:
    _pattern = re.compile(re.escape(_shape.template).replace(r"\{\}", "(.+)"))
    _READERS.setdefault(_shape.template.split()[0], []).append((_pattern, _shape))
_CLOSING_POLARITY = {text: polarity for polarity, texts in CLOSINGS.items() for text in texts}


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """One sentence as the grammar reads it; a malformed one has sentiment 0 and no aspects.

    A sentence that is grammatical but makes no sense (a tasty view, liked because it was bad) is well-formed
    and worth nothing.
    """

    wellformed: bool
    sentiment: float  # sum over clauses; a closing's is -0.5, 0 or 0.5
    text: str
    aspects: tuple[str, ...] = ()
    emphasis: float = 0.0  # of its intensifiers
    closing: bool = False


def _read_clause(text: str, reason: bool) -> tuple[str, Predicate] | None:
    noun = text.split(" ", 1)[0]
    aspect = ASPECTS.get(noun)
    if aspect is None:
        return None
    lead = (reason_clause if reason else clause)(aspect, "")
    predicate = _READABLE[aspect.topic].get(text[len(lead) :])
    return (noun, predicate) if predicate and text.startswith(lead) else None


@lru_cache(maxsize=1 << 15)
def _read_sentence(text: str) -> ParsedSentence:
    if text in _CLOSING_POLARITY:
        return ParsedSentence(True, CLOSING_WORTH * _CLOSING_POLARITY[text], text, closing=True)
    for pattern, shape in _READERS.get(text.split(" ", 1)[0], []):
        if not (match := pattern.fullmatch(text)):
            continue
        clauses = [_read_clause(group, shape.reason) for group in match.groups()]
        read = [parts for parts in clauses if parts]
        aspects = tuple(noun for noun, _ in read)
        meanings = [predicate for _, predicate in read]
        if len(read) < len(clauses) or len(set(aspects)) < len(aspects):
            continue
        if not shape.fits(*(p.polarity for p in meanings)):  # "We liked the soup because it was cold ."
            return ParsedSentence(True, 0.0, text, aspects)
        emphasis = sum(p.emphasis for p in meanings)
        return ParsedSentence(True, sum(p.sentiment for p in meanings), text, aspects, emphasis)
    return ParsedSentence(False, 0.0, text)


def parse_response(text: str) -> list[ParsedSentence]:
    """Cut a response after each " ." and read every sentence; a rest without a period is malformed.

    White space around the whole text is ignored, inside it counts: two spaces or a line break are malformed.
    An empty text has no sentences.
    """
    sentences, words = [], []
    for word in text.strip().split(" "):
        words.append(word)
        if word == ".":
            sentences.append(" ".join(words))
            words = []
    if rest := " ".join(words):
        sentences.append(rest)
    return [_read_sentence(sentence) for sentence in sentences]
