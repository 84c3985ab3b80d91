"""Texts, prompts and preference pairs of `builtin:reviews`, all from one seed."""

from dataclasses import dataclass
from math import exp
from random import Random

from rlhf_kl.builtin.generator import write_response
from rlhf_kl.builtin.gold import gold_score
from rlhf_kl.builtin.grammar import openings

HELDOUT_SHARE = 0.1  # of the openings; every held-out part draws its prompts from these and only these
NOISE_SCALE = 0.3  # gold units per logit of the labeller
FLIP_SHARE = 0.03  # of the labels are turned round
CORRUPTED_SHARE = 0.25  # pairs of which one response is damaged


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
