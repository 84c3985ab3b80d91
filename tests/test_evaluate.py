from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.evaluate import distinct_n, perplexity, policy_figures, windows
from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.models.load import load_causal_lm, load_tokenizer
from rlhf_kl.models.text import encode, pad
from rlhf_kl.rollout.collect import Sampling, draw, response_texts
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ["abcd", "a", "ddddcccc", "badc" * 6]


@torch.no_grad()
def nll(model: Any, ids: list[int], first: int = 1) -> float:
    """Of the tokens from `first` on, by one plain pass over the whole text."""
    logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -sum(float(logp[t - 1, ids[t]]) for t in range(first, len(ids)))


def test_against_a_direct_computation(new_model: Make, letters: Any) -> None:
    model = new_model()
    found = perplexity(model, letters, TEXTS)
    rows = [encode(letters, text) for text in TEXTS]  # bos in front, no eos
    total, tokens = sum(nll(model, row) for row in rows), sum(len(text) for text in TEXTS)
    assert found.tokens == tokens
    assert found.documents == 4
    assert found.bytes == tokens  # one byte a letter
    assert found.nats_per_token == pytest.approx(total / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / tokens, rel=1e-5)


def test_bytes_are_those_of_utf8(new_model: Make, letters: Any) -> None:
    assert perplexity(new_model(), letters, ["aé🙂"]).bytes == 1 + 2 + 4


def test_order_and_batches_change_nothing(new_model: Make, letters: Any) -> None:
    model = new_model()
    whole = perplexity(model, letters, TEXTS)
    for texts, rows in ((TEXTS[::-1], 32), (TEXTS, 1), (TEXTS, 3)):
        found = perplexity(model, letters, texts, rows=rows)
        assert found.nats_per_token == pytest.approx(whole.nats_per_token, rel=1e-6)
        assert found.tokens == whole.tokens


def test_the_mean_is_over_tokens_and_not_over_documents(new_model: Make, letters: Any) -> None:
    model = new_model()
    one, other = (perplexity(model, letters, [text]) for text in ("a", "badc" * 6))
    both = perplexity(model, letters, ["a", "badc" * 6])
    assert both.nats_per_token == pytest.approx((one.nats_per_token + 24 * other.nats_per_token) / 25)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 12, 13, 40, 41])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_windows_score_every_token_but_the_first_once(length: int, size: int) -> None:
    ids = list(range(length))
    pieces = list(windows(ids, size))
    scored = [token for piece in pieces for token in piece.ids[piece.first :]]
    assert scored == ids[1:]
    assert all(len(piece.ids) <= size for piece in pieces)
    for piece in pieces[1:-1]:  # half of each window is there for its context only
        assert piece.first == size // 2


def test_a_long_document_is_read_by_windows(new_model: Make, letters: Any) -> None:
    """Each later window starts half a window back and scores its second half."""
    model, text = new_model(context=8), "abcdbacdda"
    ids = encode(letters, text)  # 11 tokens
    found = perplexity(model, letters, [text])
    by_hand = nll(model, ids[0:8]) + nll(model, ids[4:11], first=4)
    assert found.tokens == 10
    assert found.nats_per_token == pytest.approx(by_hand / 10, rel=1e-5)
    assert perplexity(new_model(), letters, [text], window=8).tokens == 10


def test_bos_is_put_in_front_once(new_model: Make, letters: Any) -> None:
    model = new_model()
    written = perplexity(model, letters, ["<bos>abcd"])
    assert written.nats_per_token == perplexity(model, letters, ["abcd"]).nats_per_token
    assert written.tokens == 4


def test_empty_documents_count_for_nothing(new_model: Make, letters: Any) -> None:
    model = new_model()
    beside, alone = (perplexity(model, letters, texts) for texts in (["", "abcd", ""], ["abcd"]))
    assert beside.nats_per_token == alone.nats_per_token
    with pytest.raises(InputError, match="no document has a token"):
        perplexity(model, letters, ["", ""])


def test_progress_tells_of_every_window(new_model: Make, letters: Any) -> None:
    told: list[int] = []
    perplexity(new_model(), letters, TEXTS, window=8, rows=2, advance=told.append)
    assert sum(told) == sum(len(list(windows(encode(letters, text), 8))) for text in TEXTS)


@pytest.mark.parametrize(
    ("texts", "n", "share"),
    [
        (["a b c"], 2, 1.0),
        (["a b a b a"], 2, 0.5),  # ab ba ab ba
        (["a b", "a b", "a c"], 2, 2 / 3),
        (["a a a"], 1, 1 / 3),
        (["a", ""], 2, 0.0),
    ],
)
def test_distinct_n(texts: list[str], n: int, share: float) -> None:
    assert distinct_n(texts, n) == pytest.approx(share)


def test_figures_of_a_policy(new_model: Make, letters: Any) -> None:
    policy, reference, texts = new_model(seed=3), new_model(seed=2), ["ab", "c", "dabc"] * 4
    ids, mask = pad([encode(letters, text) for text in texts], 0, left=True)
    prompts, sampling = PromptBatch(texts, ids, mask), Sampling(6, 1.0, [2], 0)
    noise = uniforms(12, 6, 0, "x")

    def score(prompts: Any, responses: Any) -> list[float]:
        return [float(len(response)) for response in responses]

    arguments = (reference, prompts, noise, sampling, letters)
    found = policy_figures(ActorCritic(policy), *arguments, score, score)
    sampled = draw(policy, prompts, noise, sampling, "cpu")
    letters_drawn = [len(text) for text in response_texts(letters, sampled)]
    assert found.scores == pytest.approx(sum(letters_drawn) / 12)
    assert found.gold == pytest.approx(found.scores)
    assert found.length == pytest.approx(int(sampled.mask.sum()) / 12)
    assert found.eos_rate == pytest.approx(int(sampled.ended.sum()) / 12)
    assert found.kl_sequence * 12 == pytest.approx(found.kl_token * int(sampled.mask.sum()))
    assert found.kl_token > 0.01
    same = policy_figures(ActorCritic(reference), *arguments)
    assert same.kl_token == pytest.approx(0.0, abs=1e-5)
    assert same.scores is None
    assert same.gold is None


def test_a_real_model_on_real_stories(real_data: Path) -> None:
    """Measured independently: bos prepended, eos not scored."""
    folder = str(real_data / "models" / "TinyStories-656K-resaved")
    stories = real_data / "data" / "tinystories-1000" / "stories.jsonl"
    lines = stories.read_text(encoding="utf-8").split("\n")[:200]
    texts = [json.loads(line)["text"] for line in lines]
    found = perplexity(load_causal_lm(folder), load_tokenizer(folder), texts)
    assert found.documents == 200
    assert found.nats_per_token == pytest.approx(3.2278, rel=1e-3)
    assert found.bits_per_byte == pytest.approx(1.1775, rel=1e-3)
