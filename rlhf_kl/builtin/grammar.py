"""The grammar of `builtin:reviews`: one table of phrases and shapes, used to write reviews and to read them.

    review   = prompt + " " + response
    prompt   = one neutral opening: who, where, when
    response = body sentences about distinct aspects, then one closing
    sentence = a shape filled with clauses, e.g. "The {} but the {} ."
    clause   = aspect, "was" or "were", predicate, e.g. "staff were very polite"

Words and punctuation are separated by single spaces, so a tokenizer can hold each as one token.
Sentiment is in units of one strong word: "awful" is -1, "bad" -0.5, "plain" 0, "good" 0.5, "wonderful" 1.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, permutations, product
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MIN_WORDS, MAX_WORDS = 20, 28  # of a written response, punctuation counted
BODY_WORDS = 15  # a body is long enough from here on
CLOSING_WORTH = 0.5
EMPHASIS = 0.25  # what "very" adds to the size of a predicate's sentiment


# --- words -------------------------------------------------------------------------------------------------


class Aspect(NamedTuple):
    noun: str
    topic: str  # which words fit it: food, people, room or place
    plural: bool
    places: str  # "lodging", "eatery" or "both": where one expects it


ASPECTS = {
    noun: Aspect(noun, topic, noun in {"staff", "chairs", "drinks"}, places)
    for topic, places, nouns in (
        ("food", "both", "food breakfast dinner soup coffee dessert drinks"),
        ("people", "both", "staff service waiter manager"),
        ("room", "lodging", "room bed bathroom balcony"),
        ("room", "eatery", "table kitchen bar chairs"),
        ("place", "both", "location view garden terrace"),
    )
    for noun in nouns.split()
}

STRONG, MILD = 1.0, 0.5

_ADJECTIVES: dict[str, dict[float, str]] = {
    "any": {
        STRONG: "wonderful excellent perfect",
        MILD: "good nice",
        0.0: "ordinary average",
        -MILD: "bad poor",
        -STRONG: "awful terrible horrible",
    },
    "food": {
        STRONG: "delicious",
        MILD: "tasty",
        0.0: "plain",
        -MILD: "bland cold",
        -STRONG: "disgusting",
    },
    "people": {
        STRONG: "brilliant",
        MILD: "friendly polite",
        0.0: "formal",
        -MILD: "slow careless",
        -STRONG: "rude",
    },
    "room": {
        STRONG: "spotless",
        MILD: "clean cosy",
        0.0: "basic",
        -MILD: "noisy damp",
        -STRONG: "filthy",
    },
    "place": {
        STRONG: "beautiful",
        MILD: "peaceful pretty",
        0.0: "small",
        -MILD: "crowded gloomy",
        -STRONG: "ugly",
    },
}
_FACTS = {
    "food": "served at noon|served at eight",
    "people": "there all day|there until late",
    "room": "near the stairs|near the entrance",
    "place": "behind the main building|next to the church",
}
_INTENSIFIERS = {MILD: ("very", "really", "so"), STRONG: ("absolutely", "truly", "simply")}
_NEGATED = {"not good": -0.5, "not nice": -0.5, "not bad": 0.25, "not perfect": -0.25}
_COMPARED = {"better than we expected": 0.75, "worse than we expected": -0.75, "just as we expected": 0.0}


@dataclass(frozen=True, slots=True)
class Predicate:
    text: str
    sentiment: float
    emphasis: float = 0.0  # signed, not part of sentiment
    polarity: int = field(init=False)  # -1, 0 or 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "polarity", (self.sentiment > 0) - (self.sentiment < 0))


def _predicates(topic: str) -> dict[str, list[Predicate]]:
    """Every predicate of a topic, by form."""
    words = {
        adjective: worth
        for source in (_ADJECTIVES["any"], _ADJECTIVES[topic])
        for worth, adjectives in source.items()
        for adjective in adjectives.split()
    }
    return {
        "plain": [Predicate(word, worth) for word, worth in words.items()],
        "intense": [
            Predicate(f"{very} {word}", worth, EMPHASIS if worth > 0 else -EMPHASIS)
            for word, worth in words.items()
            if worth
            for very in _INTENSIFIERS[abs(worth)]
        ],
        "pair": [
            Predicate(f"{one} and {two}", (words[one] + words[two]) / 2)
            for one, two in permutations(words, 2)
            if words[one] * words[two] > 0 or words[one] == words[two]
        ],
        "negated": [Predicate(text, worth) for text, worth in _NEGATED.items()],
        "other": [Predicate(text, worth) for text, worth in _COMPARED.items()]
        + [Predicate(fact, 0.0) for fact in _FACTS[topic].split("|")],
    }


def _readable(topic: str) -> dict[str, Predicate]:
    """Every predicate that is grammatical about a topic; words that do not fit it ("tasty" of a view) are
    worth nothing there, and so is a pair that takes back what it says ("good and bad")."""
    fitting = {p.text: p.sentiment for p in _predicates(topic)["plain"]}
    words = [word for source in _ADJECTIVES.values() for adjectives in source.values() for word in adjectives.split()]
    found = {word: Predicate(word, fitting.get(word, 0.0)) for word in words}
    for word in words:
        worth = fitting.get(word, 0.0)
        for very in sum(_INTENSIFIERS.values(), ()):
            found[f"{very} {word}"] = Predicate(f"{very} {word}", worth, EMPHASIS * ((worth > 0) - (worth < 0)))
    for one, two in permutations(words, 2):
        worths = fitting.get(one, 0.0), fitting.get(two, 0.0)
        agree = min(worths) > 0 or max(worths) < 0
        found[f"{one} and {two}"] = Predicate(f"{one} and {two}", sum(worths) / 2 if agree else 0.0)
    for text, worth in (_NEGATED | _COMPARED).items():
        found[text] = Predicate(text, worth)
    for facts in _FACTS.values():
        found |= {fact: Predicate(fact, 0.0) for fact in facts.split("|")}
    return found


_FORM_WEIGHTS = {"plain": 0.4, "intense": 0.24, "pair": 0.2, "negated": 0.06, "other": 0.1}
_READABLE: dict[str, dict[str, Predicate]] = {}  # topic -> text -> predicate
_WRITABLE: dict[tuple[str, int], tuple[list[float], list[list[Predicate]]]] = {}  # cumulative weights, forms
for _topic in _FACTS:
    _forms = _predicates(_topic)
    _READABLE[_topic] = _readable(_topic)
    for _polarity in (-1, 0, 1):
        _fit = {name: [p for p in form if p.polarity == _polarity] for name, form in _forms.items()}
        _names = [name for name, form in _fit.items() if form]
        _weights = list(accumulate(_FORM_WEIGHTS[name] for name in _names))
        _WRITABLE[_topic, _polarity] = (_weights, [_fit[name] for name in _names])


# --- shapes ------------------------------------------------------------------------------------------------


def _anything(*_: int) -> bool:
    return True


class Shape(NamedTuple):
    template: str  # each {} is a clause
    fits: Callable[..., bool]  # of the clauses' polarities, in order
    reason: bool = False  # "soup because it was cold" in place of "soup was cold"


_SHAPES = (
    Shape("The {} .", _anything),
    Shape("Also , the {} .", _anything),
    Shape("We thought the {} .", _anything),
    Shape("Everyone agreed that the {} .", _anything),
    Shape("Luckily , the {} .", lambda a: a > 0),
    Shape("Sadly , the {} .", lambda a: a < 0),
    Shape("We liked the {} .", lambda a: a > 0, reason=True),
    Shape("We loved the {} .", lambda a: a > 0, reason=True),
    Shape("We disliked the {} .", lambda a: a < 0, reason=True),
    Shape("We hated the {} .", lambda a: a < 0, reason=True),
    Shape("The {} and the {} .", lambda a, b: a * b >= 0),
    Shape("The {} while the {} .", lambda a, b: a * b >= 0),
    Shape("The {} but the {} .", lambda a, b: a != b),
    Shape("The {} although the {} .", lambda a, b: a != b),
)
_READERS: dict[str, list[tuple[re.Pattern[str], Shape]]] = {}  # by first word
for _shape in _SHAPES:
    _pattern = re.compile(re.escape(_shape.template).replace(r"\{\}", "(.+)"))
    _READERS.setdefault(_shape.template.split()[0], []).append((_pattern, _shape))
_FITTING = {
    polarities: [s for s in _SHAPES if s.template.count("{") == len(polarities) and s.fits(*polarities)]
    for count in (1, 2)
    for polarities in product((-1, 0, 1), repeat=count)
}


def _expand(template: str) -> list[str]:
    """Every text of a template with "{this|that|}" choices."""
    parts = [part.split("|") for part in re.split(r"[{}]", template)]
    return [" ".join("".join(choice).split()) for choice in product(*parts)]


_CLOSINGS = {
    polarity: [text for template in templates for text in _expand(template)]
    for polarity, templates in {
        1: (
            "We will {gladly|surely|} come back {soon|again|next year} .",
            "We {gladly|surely|} recommend this place to {everyone|anyone} .",
            "It was worth {the money|every penny} .",
        ),
        0: (
            "We {may|might} try it again {some day|next year} .",
            "That is all we can say {about it|for now} .",
            "It was {one more|just another} {day|night} away from home .",
        ),
        -1: (
            "We will never {return|come back|go there again} .",
            "We {cannot|would not} recommend this place to {everyone|anyone} .",
            "It was {a waste of|not worth the} {money|time} .",
        ),
    }.items()
}
_CLOSING_POLARITY = {text: polarity for polarity, texts in _CLOSINGS.items() for text in texts}

_WHO = (
    "We",
    "I",
    "My wife and I",
    "My family",
    "My friends and I",
    "Our group",
    "My sister and I",
    "My parents",
)
_WHEN = [
    *_expand("last {weekend|summer|winter|month}"),
    *_expand("in {May|June|October}"),
    *_expand("on a {Friday|Sunday|rainy day}"),
    "after a long walk",
    "before the concert",
]
_NAMES = _expand("{harbour|station|castle|river|market|bridge|lake|forest|hill|village|mill|tower}")
_PLACES = {
    "lodging": (("hotel", "inn", "lodge"), ("stayed at", "booked a room at", "spent a night at")),
    "eatery": (("cafe", "restaurant", "pub"), ("ate at", "booked a table at", "spent a day at")),
}
_KIND = {kind: place for place, (kinds, _) in _PLACES.items() for kind in kinds}
_EXPECTED = {
    place: tuple(a for a in ASPECTS.values() if a.places in ("both", place)) for place in ("lodging", "eatery")
}


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


@cache
def openings() -> tuple[str, ...]:
    """Every prompt of the grammar, about 40 000, in a fixed order."""
    found = []
    for kinds, verbs in _PLACES.values():
        for who, verb, name, kind, when in product(_WHO, verbs, _NAMES, kinds, _WHEN):
            lower = who if who == "I" else who[0].lower() + who[1:]
            found.append(f"{who} {verb} the {name} {kind} {when} .")
            found.append(f"{_upper(when)} {lower} {verb} the {name} {kind} .")
    return tuple(found)


def aspects_of(prompt: str) -> tuple[Aspect, ...]:
    """The aspects one expects of the place that the prompt names; all of them where it names none."""
    for word in prompt.split():
        if word in _KIND:
            return _EXPECTED[_KIND[word]]
    return tuple(ASPECTS.values())


def closing_agrees(closing: float, body: float) -> bool:
    """Whether a closing's sentiment goes with the summed sentiment of the body; a neutral one always does."""
    return closing == 0 or closing * body > 0


# --- writing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Review:
    prompt: str
    response: str
    mood: float  # in [-1, 1]; the words follow it, loosely


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


def _be(aspect: Aspect) -> str:
    return "were" if aspect.plural else "was"


def _clause(aspect: Aspect, predicate: str) -> str:
    return f"{aspect.noun} {_be(aspect)} {predicate}"


def _reason(aspect: Aspect, predicate: str) -> str:
    return f"{aspect.noun} because {'they' if aspect.plural else 'it'} {_be(aspect)} {predicate}"


def _write_sentence(rng: Random, aspects: list[Aspect], mood: float) -> tuple[str, float]:
    predicates = [_draw_predicate(rng, a.topic, _draw_polarity(rng, mood)) for a in aspects]
    shape = _pick(rng, _FITTING[tuple([p.polarity for p in predicates])])
    phrase = _reason if shape.reason else _clause
    phrases = [phrase(aspect, p.text) for aspect, p in zip(aspects, predicates, strict=True)]
    return shape.template.format(*phrases), sum([p.sentiment for p in predicates])


def _write_closing(rng: Random, body: float) -> str:
    neutral = 0.1 if abs(body) >= 1 else 0.6
    polarity = 0 if body == 0 or rng.random() < neutral else 1 if body > 0 else -1
    return _pick(rng, _CLOSINGS[polarity])


def _words(text: str) -> int:
    return text.count(" ") + 1


def _write_body(rng: Random, expected: tuple[Aspect, ...], mood: float) -> tuple[str, float]:
    """Sentences of one or two clauses until there are BODY_WORDS words."""
    untold = list(expected)
    sentences, words, total = [], 0, 0.0
    while words < BODY_WORDS:
        told = [untold.pop(int(rng.random() * len(untold))) for _ in range(1 + (rng.random() < 0.5))]
        sentence, sentiment = _write_sentence(rng, told, mood)
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


def write_review(rng: Random) -> Review:
    """A review with a prompt and a mood drawn uniformly; the same generator state gives the same review."""
    prompt, mood = _pick(rng, openings()), rng.uniform(-1, 1)
    return Review(prompt, write_response(rng, prompt, mood), mood)


# --- reading -----------------------------------------------------------------------------------------------


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
    emphasis: float = 0.0  # what its intensifiers would add
    closing: bool = False

    @property
    def aspect(self) -> str | None:
        """The first aspect it speaks of; None for a closing or a malformed sentence."""
        return self.aspects[0] if self.aspects else None


def _read_clause(text: str, reason: bool) -> tuple[str, Predicate] | None:
    noun = text.split(" ", 1)[0]
    aspect = ASPECTS.get(noun)
    if aspect is None:
        return None
    lead = (_reason if reason else _clause)(aspect, "")
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
        read = [clause for clause in clauses if clause]
        aspects = tuple(noun for noun, _ in read)
        predicates = [predicate for _, predicate in read]
        if len(read) < len(clauses) or len(set(aspects)) < len(aspects):
            continue
        if not shape.fits(*(p.polarity for p in predicates)):  # "We liked the soup because it was cold ."
            return ParsedSentence(True, 0.0, text, aspects)
        emphasis = sum(p.emphasis for p in predicates)
        return ParsedSentence(True, sum(p.sentiment for p in predicates), text, aspects, emphasis)
    return ParsedSentence(False, 0.0, text)


def parse_response(text: str) -> list[ParsedSentence]:
    """Cut a response after each " ." and read every sentence; what is left without a period is malformed.

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
