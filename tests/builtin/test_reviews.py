import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from review_corpus import (
    MAX_WORDS,
    MIN_WORDS,
    Corpus,
    CorpusSizes,
    corrupt,
    openings,
    write_corpus,
    write_response,
)

from rlhf_kl.builtin.gold import gold_score
from rlhf_kl.builtin.grammar import aspects_of
from rlhf_kl.builtin.parser import parse_response

SCRIPTS = Path(__file__).parents[2] / "scripts"


def write_review(rng: Random) -> tuple[str, str]:
    """A prompt and a response to it, in a mood drawn uniformly."""
    prompt = openings()[int(rng.random() * len(openings()))]
    return prompt, write_response(rng, prompt, rng.uniform(-1, 1))


@given(seed=st.integers(0, 2**32), mood=st.floats(-1, 1))
@settings(max_examples=300, deadline=None)
def test_every_written_response_reads_as_wellformed(seed, mood):
    rng = Random(seed)
    prompt = rng.choice(openings())
    response = write_response(rng, prompt, mood)
    sentences = parse_response(response)
    aspects = [noun for sentence in sentences for noun in sentence.aspects]
    assert all(s.wellformed for s in sentences)
    assert [s.closing for s in sentences] == [False] * (len(sentences) - 1) + [True]
    assert " ".join(s.text for s in sentences) == response
    assert len(set(aspects)) == len(aspects) >= 2
    assert set(aspects) <= {aspect.noun for aspect in aspects_of(prompt)}
    assert MIN_WORDS <= len(response.split()) <= MAX_WORDS
    assert "  " not in response
    assert response == response.strip()


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_word_from_outside_the_grammar_spoils_its_sentence(seed, data):
    words = write_review(Random(seed))[1].split()
    where = data.draw(st.sampled_from([i for i, word in enumerate(words) if word != "."]))
    words[where] = "zebra"
    spoilt = [s.text for s in parse_response(" ".join(words)) if not s.wellformed]
    assert len(spoilt) == 1
    assert "zebra" in spoilt[0]


@pytest.mark.parametrize(
    ("text", "sentiment", "aspects"),
    [
        ("The food was wonderful .", 1.0, ("food",)),
        ("The food was tasty .", 0.5, ("food",)),
        ("The food was very tasty .", 0.5, ("food",)),
        ("The food was plain .", 0.0, ("food",)),
        ("The food was not good .", -0.5, ("food",)),
        ("The food was not bad .", 0.25, ("food",)),
        ("The chairs were filthy .", -1.0, ("chairs",)),
        ("The staff were rude and awful .", -1.0, ("staff",)),
        ("The staff were polite and wonderful .", 0.75, ("staff",)),
        ("The view was worse than we expected .", -0.75, ("view",)),
        ("We loved the soup because it was delicious .", 1.0, ("soup",)),
        ("We hated the drinks because they were so cold .", -0.5, ("drinks",)),
        ("Sadly , the room was noisy .", -0.5, ("room",)),
        ("The soup was good and the view was beautiful .", 1.5, ("soup", "view")),
        ("The soup was cold but the view was beautiful .", 0.5, ("soup", "view")),
        ("We will never return .", -0.5, ()),
        ("It was worth every penny .", 0.5, ()),
        ("That is all we can say for now .", 0.0, ()),
    ],
)
def test_sentiment_of_a_sentence(text, sentiment, aspects):
    (sentence,) = parse_response(text)
    assert sentence.wellformed
    assert (sentence.sentiment, sentence.aspects) == (sentiment, aspects)
    assert sentence.closing == (not aspects)


@pytest.mark.parametrize(
    "text",
    [
        "The food was wonderful",  # no period
        "the food was wonderful .",
        "The food were wonderful .",
        "The staff was polite .",
        "The food was was wonderful .",
        "The food was wonderful wonderful .",
        "The food was good and good .",
        "The food was very very good .",
        "The food was good and the food was tasty .",
        "We loved the drinks because it was fresh .",
        "We loved the food .",
        "The food because it was good .",
        "The  food was good .",
        "The food was good\n.",
        "We will never .",
        "food .",
        ".",
    ],
)
def test_malformed(text):
    sentences = parse_response(text)
    assert [s.wellformed for s in sentences] == [False]
    assert (sentences[0].sentiment, sentences[0].aspects) == (0.0, ())


@pytest.mark.parametrize(
    "text",
    [
        "The food was good and awful .",
        "The food was friendly .",  # a word for people
        "The food was very plain .",
        "The food was good and the view was ugly .",  # wants "but"
        "The food was good but the view was pretty .",
        "Luckily , the food was cold .",
        "We loved the food because it was bland .",
    ],
)
def test_a_sentence_that_makes_no_sense_is_worth_nothing(text):
    (sentence,) = parse_response(text)
    assert sentence.wellformed
    assert sentence.sentiment == 0
    assert sentence.aspects


def test_a_response_is_cut_at_its_periods_and_the_rest_is_malformed():
    sentences = parse_response(" The food was good . The view was crowded . We will\n")
    assert [(s.text, s.wellformed) for s in sentences] == [
        ("The food was good .", True),
        ("The view was crowded .", True),
        ("We will", False),
    ]
    assert parse_response("") == parse_response(" \n") == []


def test_openings_are_many_and_distinct():
    assert len(set(openings())) == len(openings()) > 10_000
    for prompt in openings()[::97]:
        assert prompt.endswith(" .")
        assert prompt[0].isupper()
        assert len(prompt.split()) <= 16


def test_the_place_decides_which_aspects_fit():
    assert "balcony" in {a.noun for a in aspects_of("We stayed at the lake hotel in May .")}
    assert "balcony" not in {a.noun for a in aspects_of("We ate at the lake pub in May .")}
    assert {"balcony", "chairs"} <= {a.noun for a in aspects_of("Once upon a time .")}


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


def test_scores_of_fresh_reviews_spread_around_zero():
    rng = Random(3)
    scores = [gold_score(*write_review(rng)) for _ in range(4000)]
    assert abs(mean(scores)) < 0.12
    assert 1.1 < stdev(scores) < 1.6
    assert sum(s > 2 for s in scores) > 100
    assert min(scores) > -3


SIZES = CorpusSizes(train_texts=1500, heldout_texts=100, prompts=500, heldout_prompts=64, pairs=3000, heldout_pairs=200)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return write_corpus(0, SIZES)


def test_the_seed_decides_in_any_process():
    small = CorpusSizes(30, 10, 10, 10, 30, 10)
    code = (
        "import hashlib; from review_corpus import *;"
        "c = write_corpus(5, CorpusSizes(30, 10, 10, 10, 30, 10));"
        "print(hashlib.sha256(repr(c).encode()).hexdigest())"
    )
    digests = [hashlib.sha256(repr(write_corpus(5, small)).encode()).hexdigest()]
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, cwd=SCRIPTS, capture_output=True, text=True, check=True)
        digests.append(done.stdout.strip())
    assert len(set(digests)) == 1
    assert write_corpus(6, small) != write_corpus(5, small)


def test_a_part_depends_on_its_own_size_only(corpus):
    other = write_corpus(0, replace(SIZES, train_texts=20, prompts=30))
    assert other.pairs == corpus.pairs
    assert other.heldout_texts == corpus.heldout_texts
    assert other.prompts == corpus.prompts[:30]
    assert other.train_texts == corpus.train_texts[:20]


def test_held_out_openings_are_in_no_training_part(corpus):
    def opening(text: str) -> str:
        return text[: text.index(" .") + 2]

    def parts(texts, prompts, pairs) -> set[str]:
        return {opening(text) for text in texts} | set(prompts) | {pair.prompt for pair in pairs}

    train = parts(corpus.train_texts, corpus.prompts, corpus.pairs)
    heldout = parts(corpus.heldout_texts, corpus.heldout_prompts, corpus.heldout_pairs)
    assert train | heldout <= set(openings())
    assert not train & heldout
    assert len(set(corpus.prompts)) == len(corpus.prompts)
    assert len(set(corpus.heldout_prompts)) == len(corpus.heldout_prompts)
    assert not set(corpus.train_texts) & set(corpus.heldout_texts)


def test_texts_are_an_opening_and_a_wellformed_response(corpus):
    for text in corpus.train_texts[:300] + corpus.heldout_texts:
        cut = text.index(" .") + 2
        assert text[cut] == " "
        assert all(s.wellformed for s in parse_response(text[cut + 1 :]))


def test_labels_follow_gold_with_noise(corpus):
    margins = [gold_score(p.prompt, p.chosen) - gold_score(p.prompt, p.rejected) for p in corpus.pairs]
    clear = [m for m in margins if abs(m) > 2]
    close = [m for m in margins if 0 < abs(m) < 0.5]
    assert 0.78 < sum(m > 0 for m in margins) / len(margins) < 0.9
    # far apart, only the flips are left (3 %); near each other, the labeller is unsure
    assert 0.01 < sum(m < 0 for m in clear) / len(clear) < 0.07
    assert 0.25 < sum(m < 0 for m in close) / len(close) < 0.5
    assert all(p.chosen != p.rejected for p in corpus.pairs)


def test_some_pairs_are_damaged_and_most_are_not(corpus):
    texts = [text for p in corpus.pairs for text in (p.chosen, p.rejected)]
    damaged = [t for t in texts if not all(s.wellformed for s in parse_response(t))]
    assert 0.14 < len(damaged) / len(corpus.pairs) < 0.25
    assert max(len(t.split()) for t in texts) <= 42


def test_damage_loses_gold_on_the_whole():
    rng = Random(1)
    reviews = [write_review(rng) for _ in range(400)]
    losses = [gold_score(prompt, text) - gold_score(prompt, corrupt(rng, text)) for prompt, text in reviews]
    assert sum(losses) / len(losses) > 0.8
