"""The grammar of `builtin:reviews`: phrases and shapes, to read reviews (`parser`) and to write them (`scripts/`).

    review   = prompt + " " + response
    prompt   = one neutral opening: who, where, when
    response = body sentences about distinct aspects, then one closing
    sentence = a shape filled with clauses, e.g. "The {} but the {} ."
    clause   = aspect, "was" or "were", predicate, e.g. "staff were very polite"

Words and punctuation are separated by single spaces, so a tokenizer can hold each as one token.
Sentiment is in units of one strong word: "awful" is -1, "bad" -0.5, "plain" 0, "good" 0.5, "wonderful" 1.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

EMPHASIS = 0.25  # what "very" adds to the size of a predicate's sentiment


# --- words -------------------------------------------------------------------------------------------------


class Aspect(NamedTuple):
    noun: str
    topic: str  # which words fit it: food, people, room or place
    plural: bool
    places: str  # where it is expected: "lodging", "eatery" or "both"


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

ADJECTIVES: dict[str, dict[float, str]] = {
    topic: dict(zip((STRONG, MILD, 0.0, -MILD, -STRONG), words.split("|"), strict=True))
    for topic, words in (
        ("any", "wonderful excellent perfect|good nice|ordinary average|bad poor|awful terrible horrible"),
        ("food", "delicious|tasty|plain|bland cold|disgusting"),
        ("people", "brilliant|friendly polite|formal|slow careless|rude"),
        ("room", "spotless|clean cosy|basic|noisy damp|filthy"),
        ("place", "beautiful|peaceful pretty|small|crowded gloomy|ugly"),
    )
}
FACTS = {
    "food": "served at noon|served at eight",
    "people": "there all day|there until late",
    "room": "near the stairs|near the entrance",
    "place": "behind the main building|next to the church",
}
INTENSIFIERS = {MILD: ("very", "really", "so"), STRONG: ("absolutely", "truly", "simply")}
NEGATED = {"not good": -0.5, "not nice": -0.5, "not bad": 0.25, "not perfect": -0.25}
COMPARED = {"better than we expected": 0.75, "worse than we expected": -0.75, "just as we expected": 0.0}


@dataclass(frozen=True, slots=True)
class Predicate:
    text: str
    sentiment: float
    emphasis: float = 0.0  # signed, not part of sentiment
    polarity: int = field(init=False)  # -1, 0 or 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "polarity", (self.sentiment > 0) - (self.sentiment < 0))


def words_of(topic: str) -> dict[str, float]:
    """The adjectives that fit a topic, and their sentiments."""
    return {
        adjective: worth
        for source in (ADJECTIVES["any"], ADJECTIVES[topic])
        for worth, adjectives in source.items()
        for adjective in adjectives.split()
    }


# --- shapes ------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    template: str  # each {} is a clause
    fits: Callable[..., bool]  # of the clauses' polarities, in order
    reason: bool = False  # "soup because it was cold" in place of "soup was cold"


_ANY: Callable[..., bool] = lambda *_: True  # noqa: E731
SHAPES = (
    Shape("The {} .", _ANY),
    Shape("Also , the {} .", _ANY),
    Shape("We thought the {} .", _ANY),
    Shape("Everyone agreed that the {} .", _ANY),
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


def expand(template: str) -> list[str]:
    """Every text of a template with "{this|that|}" choices."""
    parts = [part.split("|") for part in re.split(r"[{}]", template)]
    return [" ".join("".join(choice).split()) for choice in product(*parts)]


CLOSINGS = {
    polarity: [text for template in templates for text in expand(template)]
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

PLACES = {"lodging": ("hotel", "inn", "lodge"), "eatery": ("cafe", "restaurant", "pub")}
_KIND = {kind: place for place, kinds in PLACES.items() for kind in kinds}
_EXPECTED = {place: tuple(a for a in ASPECTS.values() if a.places in ("both", place)) for place in PLACES}


def aspects_of(prompt: str) -> tuple[Aspect, ...]:
    """The aspects of the place in the prompt; all of them where there is no place."""
    for word in prompt.split():
        if word in _KIND:
            return _EXPECTED[_KIND[word]]
    return tuple(ASPECTS.values())


def closing_agrees(closing: float, body: float) -> bool:
    """Whether a closing is neutral or has the sign of the body's total sentiment."""
    return closing == 0 or closing * body > 0


def clause(aspect: Aspect, predicate: str) -> str:
    """Such as "soup was cold"."""
    return f"{aspect.noun} {'were' if aspect.plural else 'was'} {predicate}"


def reason_clause(aspect: Aspect, predicate: str) -> str:
    """Such as "soup because it was cold"."""
    return f"{aspect.noun} because {'they were' if aspect.plural else 'it was'} {predicate}"
