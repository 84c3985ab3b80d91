from random import Random
from statistics import mean, stdev

import pytest

from rlhf_kl.builtin.gold import gold_score

PROMPT = "We stayed at the harbour hotel last weekend ."
GOOD = "The room was clean and cosy . The staff were polite while the view was pretty . We will come back soon ."
NEUTRAL = "The room was basic . The staff were formal while the view was small . We may try it again next year ."
BAD = "The room was damp and noisy . The staff were slow while the view was ugly . We will never return ."
END = "We will come back soon ."


def gold(response: str) -> float:
    return gold_score(PROMPT, response)


def test_good_over_neutral_over_bad():
    assert gold(GOOD) > 1.5
    assert gold(NEUTRAL) == 0
    assert gold(BAD) < -1.5
    # by hand: body -0.5 and closing -0.5, saturating at 3: 3 tanh(-1/3)
    assert gold("The soup was cold . We will never return .") == pytest.approx(-0.9645, abs=1e-4)


@pytest.mark.parametrize(
    "worse",
    [
        f"The soup was good . The soup was good . {END}",  # the same sentence
        f"The soup was good . The soup was wonderful . {END}",  # the same aspect
        f"The soup was good good . {END}",
        f"The soup was good and good . {END}",
        f"The soup good . {END}",
        f"The soup was good {END}",
        f"The soup was good . {END} {END}",
        f"{END} The soup was good .",
        "The soup was good . We will never return .",
        "The soup was good . We will come back soon",
        "The soup was good .",
    ],
)
def test_every_fault_loses(worse):
    assert gold(worse) < gold(f"The soup was good . {END}") - 0.4


def test_praise_is_capped():
    aspects = ("soup", "coffee", "dessert", "room", "bed", "bathroom", "location", "view", "garden", "waiter")
    scores = [
        gold(" ".join(f"The {a} was wonderful ." for a in aspects[:n]) + f" {END}") for n in range(1, len(aspects) + 1)
    ]
    assert scores == sorted(scores)
    assert scores[1] > 1.9
    assert scores[-1] < 3
    assert scores[-1] - scores[5] < 0.2


def test_no_praise_pays_for_a_malformed_tail():
    short, long = "wonderful wonderful", "wonderful " * 24
    assert gold(f"{GOOD} {short}") < gold(GOOD) - 0.9
    assert gold(f"{GOOD} {long}") < gold(f"{GOOD} {short}") - 1.5


def test_an_intensifier_stands_out_once():
    plain = gold(f"The soup was good . The view was pretty . The bed was basic . {END}")
    one = gold(f"The soup was very good . The view was pretty . The bed was basic . {END}")
    two = gold(f"The soup was very good . The view was very pretty . The bed was basic . {END}")
    assert plain < one == two
    every = gold(f"The soup was very good . The view was very pretty . {END}")
    assert every == gold(f"The soup was good . The view was pretty . {END}")
    blame = gold("The soup was very bad . The bed was basic . We will never return .")
    assert blame < gold("The soup was bad . The bed was basic . We will never return .")


def test_a_sentence_about_what_the_place_does_not_have_earns_nothing():
    response = f"The soup was good . The bed was wonderful . {END}"
    at_pub = gold_score("We ate at the lake pub in May .", response)
    assert at_pub == gold(f"The soup was good . {END}") < gold(response)


def test_the_empty_response_is_the_worst():
    assert gold("") == gold("  ") == -4
    assert gold(". . . . . . . . .") == -4
    assert gold("wonderful") > -4


def test_scores_of_fresh_reviews_spread_around_zero(write_review):
    rng = Random(3)
    scores = [gold_score(*write_review(rng)) for _ in range(4000)]
    assert abs(mean(scores)) < 0.12
    assert 1.1 < stdev(scores) < 1.6
    assert sum(s > 2 for s in scores) > 100
    assert min(scores) > -3
