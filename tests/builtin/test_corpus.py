import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from rlhf_kl.builtin.corpus import Corpus, CorpusSizes, corrupt, write_corpus
from rlhf_kl.builtin.gold import gold_score
from rlhf_kl.builtin.grammar import openings
from rlhf_kl.builtin.parser import parse_response

SIZES = CorpusSizes(train_texts=1500, heldout_texts=100, prompts=500, heldout_prompts=64, pairs=3000, heldout_pairs=200)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return write_corpus(0, SIZES)


def test_the_seed_decides_in_any_process():
    small = CorpusSizes(30, 10, 10, 10, 30, 10)
    code = (
        "import hashlib; from rlhf_kl.builtin.corpus import *;"
        "c = write_corpus(5, CorpusSizes(30, 10, 10, 10, 30, 10));"
        "print(hashlib.sha256(repr(c).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {hashlib.sha256(repr(write_corpus(5, small)).encode()).hexdigest()}
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

    train = {opening(t) for t in corpus.train_texts} | set(corpus.prompts) | {p.prompt for p in corpus.pairs}
    heldout = (
        {opening(t) for t in corpus.heldout_texts}
        | set(corpus.heldout_prompts)
        | {p.prompt for p in corpus.heldout_pairs}
    )
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


def test_damage_loses_gold_on_the_whole(write_review):
    rng = Random(1)
    reviews = [write_review(rng) for _ in range(400)]
    losses = [gold_score(prompt, text) - gold_score(prompt, corrupt(rng, text)) for prompt, text in reviews]
    assert sum(losses) / len(losses) > 0.8
