from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedTokenizerFast

from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError
from rlhf_kl.events import EvalScores, Event, ScorerFailed
from rlhf_kl.models.lm import LM
from rlhf_kl.models.perplexity import Perplexity, perplexity_of, safe_exp, text_sums, windows
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer
from rlhf_kl.models.scratch import new_gpt2
from rlhf_kl.models.tokens import decode_responses, encode
from rlhf_kl.ppo.heldout import HeldOut, Samples, asked, distinct_2, errors_of, figures_of, standard_error
from rlhf_kl.ppo.rollout import sample
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.seeding import uniforms
from rlhf_kl.training.samples import heldout_rows, token_rows, token_texts
from rlhf_kl.types import Prompts, Sampled, Sampling
from tests.made import Make

TEXTS = ["abcd", "a", "ddddcccc", "badc" * 6]


def perplexity(*arguments: Any, **options: Any) -> Perplexity:
    return perplexity_of([text_sums(*arguments, **options)])


def policy_figures(policy: LM, reference: LM, prompts: Prompts, tokenizer: Any, **options: Any) -> Any:
    samples = HeldOut(policy, reference, tokenizer, SAMPLING, prompts, **options).samples()
    return SimpleNamespace(**figures_of(*samples, []))


@torch.no_grad()
def nll(model: Any, ids: list[int], first: int = 1) -> float:
    """Of the tokens from `first` on, by one plain pass over the whole text."""
    logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -sum(float(logp[t - 1, ids[t]]) for t in range(first, len(ids)))


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_against_a_direct_computation(new_model: Make, letters: Any, batch: int) -> None:
    model = new_model()
    result = perplexity(LM(model), letters, TEXTS, rows=batch)
    rows = [encode(letters, text) for text in TEXTS]  # bos in front, no eos
    total, tokens = sum(nll(model, row) for row in rows), sum(len(text) for text in TEXTS)
    assert result.tokens == tokens
    assert result.documents == 4
    assert result.bytes == tokens  # one byte a letter
    assert result.nats_per_token == pytest.approx(total / tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / tokens, rel=1e-5)


def byte_level(**special: str) -> Any:
    """A tokenizer of the 256 bytes without merges, and what is special beside them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor, tokenizer.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize("bos", [{}, {"bos_token": "<bos>"}], ids=["no bos", "bos"])
@pytest.mark.parametrize(
    "texts",
    [["abcd"], ["hello world", " leading", "  x", "\n"], ["naïve"], ["a", "bc"], ["", "ab"]],
    ids=["letters", "spaces", "characters of several bytes", "a single one", "an empty one"],
)
def test_a_uniform_model_over_bytes_has_the_bits_of_its_vocabulary(texts: list[str], bos: dict[str, str]) -> None:
    """8 bits a byte for 256 tokens, whatever the first token of a document is."""
    tokenizer = byte_level(**bos)
    size, first = len(tokenizer), 0 if bos else 1
    model = new_gpt2(vocab_size=size, hidden_size=8, layers=1, heads=1, context=32, tokenizer=tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = perplexity(LM(model), tokenizer, texts)
    assert result.tokens == result.bytes == sum(max(0, len(text.encode()) - first) for text in texts)
    assert result.bits_per_byte == pytest.approx(math.log2(size), rel=1e-6)
    assert size == 256 + len(bos)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 12, 13, 40, 41])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_windows_score_every_token_but_the_first_once(length: int, size: int) -> None:
    ids = list(range(length))
    pieces = list(windows(ids, size))
    scored = [token for row, first in pieces for token in row[first:]]
    assert scored == ids[1:]
    assert all(len(row) <= size for row, _ in pieces)
    assert {first for _, first in pieces[1:-1]} <= {size // 2}  # half of each window is there for its context only


def test_a_long_document_is_read_by_windows(new_model: Make, letters: Any) -> None:
    """Each later window starts half a window back and scores its second half."""
    model, text = new_model(context=8), "abcdbacdda"
    ids = encode(letters, text)  # 11 tokens
    result = perplexity(LM(model), letters, [text])
    by_hand = nll(model, ids[0:8]) + nll(model, ids[4:11], first=4)
    assert result.tokens == 10
    assert result.nats_per_token == pytest.approx(by_hand / 10, rel=1e-5)


def test_bos_is_put_in_front_once(new_model: Make, letters: Any) -> None:
    model = new_model()
    written = perplexity(LM(model), letters, ["<bos>abcd"])
    assert written.nats_per_token == perplexity(LM(model), letters, ["abcd"]).nats_per_token
    assert written.tokens == written.bytes == 4


def test_empty_documents_alone_have_no_perplexity(new_model: Make, letters: Any) -> None:
    with pytest.raises(InputError, match="no document"):
        perplexity(LM(new_model()), letters, ["", ""])


def test_progress_tells_of_every_window(new_model: Make, letters: Any) -> None:
    told: list[int] = []
    perplexity(LM(new_model(context=8)), letters, TEXTS, rows=2, advance=told.append)
    assert sum(told) == sum(len(list(windows(encode(letters, text), 8))) for text in TEXTS)


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        (["a b c"], 1.0),
        (["a b a b a"], 0.5),  # ab ba ab ba
        (["a b", "a b", "a c"], 2 / 3),
        (["a", ""], None),
        (["\u6211\u559c\u6b22", "\u65e9\u9910"], None),  # without spaces nothing is known: it was once 0, all alike
    ],
)
def test_share_of_distinct_word_pairs(texts: list[str], share: float | None) -> None:
    assert distinct_2(texts) == (share and pytest.approx(share))


def test_standard_errors_are_those_of_a_mean_and_of_repeated_draws() -> None:
    """Of a mean sd / sqrt(n); of a ratio, a perplexity and word pairs as far apart as figures of new samples."""
    draws = random.Random(0)
    scores = [draws.gauss(0, 1) for _ in range(50)]
    assert standard_error(scores, [1.0] * 50) == pytest.approx(stdev(scores) / math.sqrt(50))
    assert standard_error([1.0], [1.0]) is None
    assert standard_error([7.0, 0.0, 0.0], [5, 0, 0]) is None  # nothing is left without the first
    assert standard_error([5000.0, 4000.0], [5, 5], of=safe_exp) is None

    def drawn() -> Samples:
        lengths = [draws.randint(1, 20) for _ in range(60)]
        kl = [draws.expovariate(1 / n) for n in lengths]
        texts = [" ".join(str(min(int(draws.expovariate(0.1)), 50)) for _ in range(n)) for n in lengths]
        return Samples(kl, lengths, [True] * 60, texts, [1.0, math.nan] * 30, [1.0] * 60, prompts=list(range(60)))

    made = [drawn() for _ in range(300)]
    figures = [figures_of(each, each, []) for each in made]
    for name in ("kl_token", "kl_sequence", "length", "distinct_2"):
        told = math.sqrt(fmean(figure[f"{name}_stderr"] ** 2 for figure in figures))
        assert told == pytest.approx(stdev(figure[name] for figure in figures), rel=0.2), name
    assert figures[0]["scores_stderr"] == figures[0]["eos_rate_stderr"] == 0.0
    nats = [[(draws.gauss(1, 0.5) * n, n) for n in (5, 10, 20) * 10] for _ in range(300)]
    told = math.sqrt(fmean(standard_error(*zip(*each, strict=True), of=math.exp) ** 2 for each in nats))
    found = [math.exp(sum(x for x, _ in each) / sum(n for _, n in each)) for each in nats]
    assert told == pytest.approx(stdev(found), rel=0.2)


def test_a_held_out_text_with_a_token_that_the_model_lacks_is_told(new_model: Make, letters: Any) -> None:
    wider = copy.deepcopy(letters)
    wider.add_tokens(["<new>"])
    with pytest.raises(InputError, match=r"^held-out texts: token 7 \('<new>'\)"):
        text_sums(LM(new_model()), wider, ["ab", "a<new>"])


def few_prompts(draws: random.Random, prompts: int = 12, each: int = 15) -> Samples:
    """Responses that differ between prompts: in KL, length, score (a few have none), ending and words."""
    made = Samples()
    for prompt in range(prompts):
        level, words = draws.gauss(0, 1), [str(draws.randrange(60)) for _ in range(8)]
        for _ in range(each + prompt % 2):
            length = max(2, round(10 + 3 * level + draws.gauss(0, 2)))
            made.prompts.append(prompt)
            made.lengths.append(length)
            made.kl.append(length * math.exp(0.3 * level + draws.gauss(0, 0.2)))
            made.ended.append(draws.random() < 0.5 + 0.4 * math.tanh(level))
            made.scores.append(level + draws.gauss(0, 0.5) if draws.random() < 0.9 else math.nan)
            made.watched.setdefault("gold", []).append(draws.gauss(0, 1))  # alike for all prompts
            made.texts.append(" ".join(draws.choices(words, k=length)))
    return made


@pytest.mark.slow
def test_the_draws_are_prompts_with_all_of_their_responses() -> None:
    """Beside a bootstrap that draws whole prompts, and (word pairs, which repeat in one) beside new samples.

    Each with a tolerance that responses taken for independent draws miss.
    """
    draws = random.Random(1)
    made = [few_prompts(draws) for _ in range(150)]
    figures, errors = [figures_of(each, each, []) for each in made], [errors_of(each) for each in made]
    single = [errors_of(replace(each, prompts=list(range(len(each.texts))))) for each in made]

    def mean_square(every: list[dict[str, float | None]], name: str) -> float:
        return math.sqrt(fmean((each[f"{name}_stderr"] or math.nan) ** 2 for each in every))

    for name in ("kl_token", "kl_sequence", "scores", "length", "eos_rate", "distinct_2"):
        spread = stdev(figure[name] for figure in figures)
        assert mean_square(errors, name) == pytest.approx(spread, rel=0.2), name
        assert mean_square(single, name) < 0.6 * spread, name
    assert mean_square(errors, "gold") == pytest.approx(mean_square(single, "gold"), rel=0.1)

    one = few_prompts(draws, prompts=40)
    places = [[i for i, of in enumerate(one.prompts) if of == prompt] for prompt in range(40)]
    again = [one.pick([i for rows in draws.choices(places, k=40) for i in rows]) for _ in range(400)]
    found = [figures_of(each, each, []) for each in again]
    told, apart = errors_of(one), errors_of(replace(one, prompts=list(range(len(one.texts)))))
    for name in ("kl_token", "kl_sequence", "scores", "length", "eos_rate"):
        spread = stdev(figure[name] for figure in found)
        assert told[f"{name}_stderr"] == pytest.approx(spread, rel=0.1), name
        assert (apart[f"{name}_stderr"] or math.nan) < 0.6 * spread, name


def test_a_single_prompt_has_no_standard_error() -> None:
    draws = random.Random(2)
    assert set(errors_of(few_prompts(draws, prompts=1)).values()) == {None}
    assert None not in errors_of(few_prompts(draws, prompts=2)).values()


def test_the_parts_of_a_perplexity_are_those_of_its_documents(new_model: Make, letters: Any) -> None:
    lm, texts = LM(new_model(context=8)), ["abcd", "", "ddddcccc", "badc" * 6]
    for each, text in zip(text_sums(lm, letters, texts).each, texts, strict=True):
        alone = text_sums(lm, letters, [text])
        assert each == (pytest.approx(alone.nats, rel=1e-5), len(text))


def lengths(prompts: Any, responses: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def twice(prompts: Any, responses: Any) -> list[float]:
    return [2.0 * len(response) for response in responses]


WITH_GOLD = Scorers(Scorer("reward", PluginReward(lengths)), Scorer("scorers.gold", PluginReward(twice)))


SAMPLING = Sampling(6, 1.0, [2], 0)


@pytest.fixture
def prompts(prompts_of: Make) -> Prompts:
    return prompts_of(*["ab", "c", "dabc"] * 4)  # type: ignore[no-any-return]


@pytest.fixture
def figures(prompts: Prompts, letters: Any) -> Make:
    """`figures(policy, reference, batch=...)`."""
    return lambda policy, reference, **options: policy_figures(policy, reference, prompts, letters, **options)


def kl_by_row(policy: LM, reference: LM, prompts: Prompts, own_logits: Make) -> tuple[Sampled, float]:
    """Samples of the first model, and the sum of its KL to the second at their states, in float64."""
    sampled, kl = policy.sample(prompts.ids, uniforms(12, 6, 0, "evaluation"), SAMPLING), 0.0
    for i, count in enumerate(sampled.mask.sum(1).tolist()):
        row = torch.cat([torch.tensor(prompts.ids[i]), sampled.ids[i, :count]])
        pair = (Categorical(logits=own_logits(lm.model, row)[-count - 1 : -1]) for lm in (policy, reference))
        kl += float(kl_divergence(*pair).sum())
    return sampled, kl


def test_figures_of_a_policy(new_model: Make, letters: Any, prompts: Prompts, figures: Make, own_logits: Make) -> None:
    """Against each response of the same noise by itself."""
    policy, reference = (LM(new_model(seed=seed)) for seed in (3, 2))
    result = figures(policy, reference, scorers=WITH_GOLD)
    sampled, kl = kl_by_row(policy, reference, prompts, own_logits)
    other, forward_kl = kl_by_row(reference, policy, prompts, own_logits)
    texts, tokens = decode_responses(letters, sampled.rows(), [2]), sampled.mask.sum(1).tolist()
    assert result.kl_sequence == pytest.approx(kl / 12, rel=1e-4)
    assert result.kl_token == pytest.approx(kl / sum(tokens), rel=1e-4)
    assert result.forward_kl_token == pytest.approx(forward_kl / int(other.mask.sum()), rel=1e-4)
    assert result.scores == pytest.approx(sum(map(len, texts)) / 12)
    assert result.gold == pytest.approx(2 * result.scores)
    assert result.length == pytest.approx(sum(tokens) / 12)
    assert result.eos_rate == pytest.approx(int(sampled.ended.sum()) / 12)


@pytest.fixture
def held(prompts: Prompts, letters: Any) -> Make:
    """`held(policy, reference, batch=...)`: of which no more than `batch` responses are drawn together."""
    return lambda policy, reference, **options: HeldOut(policy, reference, letters, SAMPLING, prompts, **options)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_kl.ppo.rollout.rows_at_once", lambda batch, *_: batch)


@pytest.mark.usefixtures("small_batches")
def test_the_samples_of_the_reference_are_drawn_once(
    new_model: Make, held: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second evaluation has another policy, and the forward KL of that policy."""
    policy, second, reference = (LM(new_model(seed=seed)) for seed in (3, 4, 2))
    calls = list[Any]()
    monkeypatch.setattr("rlhf_kl.ppo.rollout.sample", lambda *words: calls.append(words[0]) or sample(*words))
    keeps = held(policy, reference, batch=5)
    first = keeps.samples()
    assert first == held(policy, reference, batch=5).samples()
    policy.model.load_state_dict(second.model.state_dict())
    again = keeps.samples()
    assert again == held(policy, reference, batch=5).samples()
    assert (again[1].texts, again[1].kl == first[1].kl) == (first[1].texts, False)
    assert all(sampled.states is None for _, sampled in keeps.kept)
    assert calls.count(reference) == 3 + 2 * 3  # three batches once, and in each of the two that keep nothing


def test_a_policy_that_is_still_its_reference_is_sampled_once(
    new_model: Make, held: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, reference, later = (LM(new_model(seed=seed)) for seed in (2, 2, 3))
    options: dict[str, Any] = {"scorers": WITH_GOLD, "batch": 16}
    both, keeps = held(policy, reference, **options).samples(), held(policy, reference, **options)
    calls = list[Any]()
    monkeypatch.setattr("rlhf_kl.ppo.rollout.sample", lambda *words: calls.append(words) or sample(*words))
    once = keeps.samples(same=True)
    for one, expected in zip(once, both, strict=True):
        assert (one.texts, one.lengths, one.scores[:2]) == (expected.texts, expected.lengths, expected.scores[:2])
        assert one.kl == pytest.approx(expected.kl, abs=1e-6)
    assert len(calls) == 1
    # Later these are the samples of the reference, which are scored once.
    policy.model.load_state_dict(later.model.state_dict())
    own, other = keeps.samples()
    anew = held(policy, reference, **options).samples()
    assert (own, other) == (anew[0], replace(anew[1], scores=[], watched={}))


class Part(Ranks):
    """One of three processes, alone."""

    count = 3

    def __init__(self, index: int, whole: int) -> None:
        self.index, self.rows = index, [slice(0, 5), slice(5, 17), slice(17, whole)][index]

    def mine(self, rows: Any) -> Any:
        return rows[self.rows]

    def run(self, work: Any, *, scores: bool = False) -> Any:
        return work()


def test_the_text_that_is_shown_has_the_lower_median_score_on_any_number_of_processes(
    new_model: Make, held: Make, letters: Any, prompts: Prompts
) -> None:
    models, (every, firsts) = [LM(new_model(seed=seed)) for seed in (3, 2)], asked(prompts)
    assert (len(every), firsts) == (26, [0, 8, *range(16, 26)])
    assert every.pick(firsts) == prompts
    whole = held(*models, scorers=WITH_GOLD, several=True)
    pair = own, other = whole.samples()
    alone = held(*models).samples()
    assert [each.pick(firsts).texts for each in pair] == [each.texts for each in alone]
    assert [len(each.scores) for each in pair] == [26, 26]
    each = [
        held(*models, scorers=WITH_GOLD, several=True, batch=6, ranks=Part(index, 26)).samples() for index in range(3)
    ]
    for one, parts in zip(pair, (Samples.joined(several) for several in zip(*each, strict=True)), strict=True):
        assert (one.texts, one.scores, one.watched) == (parts.texts, parts.scores, parts.watched)
        assert len(one.tokens) == len(parts.tokens) == 26
    rows = heldout_rows(whole, own, other)
    assert [row["prompt"] for row in rows] == prompts.texts[:2]
    for i, row in enumerate(rows):
        for samples, shown in zip(pair, (row, row["reference"]), strict=True):
            texts = samples.texts[8 * i : 8 * i + 8]
            assert len(set(texts)) > 2
            assert shown["response"] in texts
            assert shown["score"] == len(shown["response"]) == sorted(map(len, texts))[3]
            assert shown["gold"] == 2 * shown["score"]
            assert (shown["score_mean"], shown["of"]) == (fmean(map(len, texts)), 8)
        assert row["kl"] == pytest.approx(sum(token["kl"] for token in row["tokens"]), abs=1e-5)
    own.scores[:8] = [*[math.nan] * 6, 1.0, 2.0]
    shown, _ = heldout_rows(whole, own, None)
    assert (shown["response"], shown["score_mean"], shown["of"]) == (own.texts[6], 1.5, 2)
    own.scores[6] = math.inf  # one score has no median
    shown = heldout_rows(whole, own, None)[0]
    assert (shown["response"], shown["score"], "of" in shown) == (own.texts[0], None, False)


def test_more_samples_count_for_the_scores_alone() -> None:
    own = Samples([0.1, 0.3], [1, 1], [True] * 2, ["a b", "c d"], [1.0, 2.0], prompts=[0, 1], watched={"x": [0.0, 2.0]})
    more = Samples([], [1], [False], ["a b"], [6.0], prompts=[2], watched={"x": [4.0]}, failures={})
    events: list[Event] = []
    alone, both = figures_of(own, own, events), figures_of(own, own, events, more)
    changed = {name for name in both if both[name] != alone[name]}
    assert changed == {"scores", "scores_stderr", "x", "x_stderr"}
    assert (both["scores"], both["x"], both["x_stderr"]) == (3.0, 2.0, pytest.approx(2 / math.sqrt(3)))
    failed = figures_of(own, own, events, replace(more, failures={"x": "no route"}))
    assert (failed["scores"], failed["x"], events) == (3.0, None, [ScorerFailed("x", "no route")])


def test_a_policy_that_is_its_reference_has_no_kl(new_model: Make, figures: Make) -> None:
    lm = LM(new_model(seed=2))
    same = figures(lm, lm)
    assert same.kl_token == same.forward_kl_token == pytest.approx(0.0, abs=1e-6)
    assert same.scores is None
    assert not hasattr(same, "gold")


def test_a_score_that_is_infinite_leaves_the_scores_out_and_is_told() -> None:
    samples = Samples([0.1] * 3, [1] * 3, [True] * 3, ["a"] * 3, [1.0, math.inf, math.nan])
    events: list[Event] = []
    figures = figures_of(samples, samples, events)
    assert (figures["scores"], figures["unscored"], events) == (None, 1, [EvalScores()])


@pytest.mark.usefixtures("small_batches")
def test_figures_do_not_depend_on_the_size_of_a_batch_but_on_the_seed(new_model: Make, figures: Make) -> None:
    policy, reference = (LM(new_model(seed=seed)) for seed in (3, 2))
    rows: list[int] = []
    hook = reference.model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    by_five = figures(policy, reference, scorers=WITH_GOLD, batch=5)
    hook.remove()
    assert rows[0] == 5
    whole = figures(policy, reference, scorers=WITH_GOLD, batch=12)
    known = {name: value for name, value in vars(whole).items() if value is not None}  # without word pairs
    assert known == pytest.approx({name: getattr(by_five, name) for name in known}, rel=1e-5)
    assert figures(policy, reference, scorers=WITH_GOLD, batch=12, seed=1) != whole


def test_a_real_model_on_real_stories(real_data: Path, own_logits: Make) -> None:
    """The figures of its own forward pass over each text alone: bos prepended, eos not scored."""
    folder = str(real_data / "models" / "TinyStories-656K-resaved")
    stories = real_data / "data" / "tinystories-1000" / "stories.jsonl"
    texts = [json.loads(line)["text"] for line in stories.read_text(encoding="utf-8").split("\n")[:60]]
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    rows = [[1, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    own = [own_logits(model, row)[:-1].log_softmax(-1) for row in rows]
    nats = -sum(float(logp.gather(1, torch.tensor([row[1:]]).T).sum()) for logp, row in zip(own, rows, strict=True))
    result = perplexity(LM(model), tokenizer, texts)
    assert result.documents == 60
    assert result.nats_per_token == pytest.approx(nats / sum(len(row) - 1 for row in rows), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / sum(len(text.encode()) for text in texts))


def test_a_token_keeps_the_blank_that_a_decoder_drops_at_the_start_of_a_text() -> None:
    raw = Tokenizer(WordLevel({"▁a": 0, "▁": 1, "always": 2, "d": 3}, unk_token="d"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    zeros = [0.0] * 3
    rows = token_rows(PreTrainedTokenizerFast(tokenizer_object=raw), [3, 1, 2], zeros, zeros, zeros)
    assert [row["text"] for row in rows] == ["d", " ", "always"]


def test_a_character_of_several_tokens_stands_at_its_last_one() -> None:
    tokenizer = byte_level()
    texts = token_texts(tokenizer, tokenizer.encode("so 💪, é", add_special_tokens=False))
    assert texts == ["s", "o", " ", "", "", "", "💪", ",", " ", "", "é"]
    cut = tokenizer.encode("a💪", add_special_tokens=False)[:3]
    assert token_texts(tokenizer, cut) == ["a", "", "\ufffd"]  # the end of the response
