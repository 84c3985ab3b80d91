from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_kl.builtin.generator import MAX_WORDS, MIN_WORDS, write_response
from rlhf_kl.builtin.grammar import aspects_of, openings
from rlhf_kl.builtin.parser import parse_response


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
def test_a_word_from_outside_the_grammar_spoils_its_sentence(write_review, seed, data):
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
