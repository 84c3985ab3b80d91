"""Evaluates a policy by its figures on held-out prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from statistics import fmean, pvariance
from typing import Any

import torch

from rlhf_kl.events import EvalScores, Event, GoldFailed
from rlhf_kl.models.lm import LM
from rlhf_kl.models.perplexity import TextSums, safe_exp
from rlhf_kl.models.tokens import decode_behind
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.masked import float64
from rlhf_kl.ppo.rollout import measure, response_layout, sample
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import GOLD, REWARD, Prompts, Responses, Sampled, Sampling

ROWS = 32
SHOWN = 2  # held-out prompts whose responses people read
EACH = 8  # responses to each of them: people read that of the median score
NO_SCORERS = Scorers()


CachedSamples = dict[tuple[int, int], tuple[Responses, Sampled]]  # by the first prompt and the one after the last


def _word_pairs(text: str) -> list[tuple[str, str]]:
    return list(pairwise(text.split()))


def distinct_2(texts: Sequence[str]) -> float:
    """Share of pairs of words that are distinct, over all texts (Li et al. 2016, 1510.03055)."""
    pairs = [pair for text in texts for pair in _word_pairs(text)]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


@dataclass
class Samples:
    """A model's responses to held-out prompts: one entry for each."""

    kl: list[float] = field(default_factory=list)  # exact KL of this model to the other one, nats
    lengths: list[int] = field(default_factory=list)  # tokens, EOS included
    ended: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # NaN = not scored
    gold: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the gold scorer
    tokens: list[list[list[Any]]] = field(default_factory=list)  # of the first `shown`: what `token_rows` reads
    prompts: list[Hashable] = field(default_factory=list)  # equal for responses to the same prompt

    def pick(self, rows: Sequence[int]) -> Samples:
        """The figures of these responses, as far as they are known."""
        names = ("kl", "lengths", "ended", "texts", "scores", "gold", "prompts")
        columns = {name: getattr(self, name) for name in names}
        picked: Any = {name: [each[i] for i in rows if i < len(each)] for name, each in columns.items()}
        return Samples(**picked, failures=self.failures)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of all ranks."""
        return cls(*([x for part in parts for x in getattr(part, column.name)] for column in fields(cls)))

    def score(self, scorers: Scorers, responses: Responses) -> None:
        """Score some more responses; gold no more after a failure."""
        values, failures = (scorers.trained if self.failures else scorers)(responses)
        self.scores += values.get(REWARD, torch.empty(0)).tolist()
        self.gold += values.get(GOLD, torch.empty(0)).tolist()
        self.failures += failures


def asked(prompts: Prompts) -> tuple[Prompts, list[int]]:
    """The prompts as they are asked, each of the first `SHOWN` `EACH` times in a row; where its first response is."""
    each = [EACH if i < SHOWN else 1 for i in range(len(prompts))]
    return prompts.pick([i for i, count in enumerate(each) for _ in range(count)]), [0, *accumulate(each)][:-1]


def policy_samples(
    policy: LM,
    reference: LM | None,
    prompts: Prompts,
    part: range,
    seed: int,
    sampling: Sampling,
    tokenizer: Any,
    scorers: Scorers = NO_SCORERS,
    batch_size: int = ROWS,
    advance: Callable[[int], None] = lambda _: None,
    cached: CachedSamples | None = None,
    purpose: str = "evaluation",
    shown: int = SHOWN * EACH,
    same: bool = False,
    firsts: Sequence[int] = (),
) -> tuple[Samples, Samples]:
    """One response of policy and of reference (if any) to each prompt of `part`, at most `batch_size` at a time.

    The noise that decides the tokens depends on seed, `purpose` and the prompt's row: only the models differ. What a
    policy has forgotten follows KL(reference || policy) on the reference's samples (Shenfeld et al. 2025, RL's Razor,
    2509.04259). `cached` keeps these, which are the same every time, for the next call, which does not score them
    again. `shown`: for so many of the prompts the tokens are kept, and the reference's responses are scored too, after
    all of the policy's. `same`: the policy is still the reference, so its samples are those of both. `firsts`, of
    `asked`: their noise depends on no other rows. `advance(n)` is called after every n responses.
    Errors: InputError from a reward function.
    """
    rows = list(firsts) or list(range(len(prompts)))
    others = sorted({*range(len(prompts))} - {*rows})
    noise = torch.empty(len(prompts), sampling.max_new_tokens, dtype=torch.float64)
    for places, name in ((rows, purpose), (others, f"{purpose}/typical")):
        noise[places] = uniforms(len(places), sampling.max_new_tokens, seed, name)
    noise, prompts = noise[part.start : part.stop], prompts.pick(part)
    pair = own, other = Samples(), Samples()

    def sampled_by(made: Samples, one: LM, to: LM | None, before: CachedSamples) -> Iterator[Responses]:
        """Batches of responses of `one`, with its exact KL at their tokens."""
        model = ActorCritic(one)
        states = None if to is None else ReferenceStates(to)

        for start in range(0, len(prompts), batch_size):
            stop = min(start + batch_size, len(prompts))
            if (start, stop) not in before:
                batch = prompts.pick(range(start, stop))
                responses, sampled = sample(one, batch, noise[start:stop], sampling, tokenizer)
                before[start, stop] = responses, sampled._replace(states=None)  # large, and not read
            responses, sampled = before[start, stop]
            texts = responses.texts
            layout = response_layout(responses.prompts.ids, sampled)
            stats = None if states is None else measure(model, states, layout, sampling.temperature)[0]
            made.lengths += sampled.mask.sum(1).tolist()
            made.ended += sampled.ended.tolist()
            made.texts += texts
            made.prompts += map(tuple, responses.prompts.ids)
            if stats is not None:
                made.kl += float64(stats.exact_kl).sum(1).tolist()
                read = (sampled.mask, sampled.ids, stats.logprobs, stats.ref_logprobs, stats.exact_kl)
                mask, *columns = (x.cpu() for x in read)  # at once: each read of a row would wait for a GPU
                for i in range(min(shown - part.start - len(made.tokens), len(texts))):
                    made.tokens.append([column[i][mask[i]].tolist() for column in columns])
            advance(len(texts))
            yield responses

    cached = {} if cached is None else cached
    left = 0 if cached else shown - part.start
    drawn = [] if reference is None or same else list(sampled_by(other, reference, policy, cached))
    for responses in sampled_by(own, policy, reference, cached if same else {}):
        own.score(scorers, responses)
    if same:
        return own, own
    for responses in drawn:
        if left > 0:
            other.score(scorers, responses.first(left))
        left -= len(responses.texts)
    return pair


def from_median(scores: Sequence[float]) -> list[int]:
    """Where the finite scores are, from the median outwards: of an even number, the lower one in the middle."""
    ranked = sorted((score, i) for i, score in enumerate(scores) if math.isfinite(score))
    middle = (len(ranked) - 1) // 2
    return [i for _, (_, i) in sorted(enumerate(ranked), key=lambda pair: abs(pair[0] - middle))]


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens (an emoji of bytes) stands at its last one."""
    shown, texts = 0, []
    for stop, text in enumerate(decode_behind(tokenizer, [ids[:stop] for stop in range(1, len(ids) + 1)]), 1):
        open_ended = text.endswith("\ufffd") and stop < len(ids)
        texts.append("" if open_ended else text[shown:])
        shown = shown if open_ended else len(text)
    return texts


def token_rows(
    tokenizer: Any, ids: list[int], logprobs: list[float], ref_logprobs: list[float], kl: list[float]
) -> list[dict[str, Any]]:
    """One mapping for each token of a response; all of T numbers, log-probs and KL in nats."""
    columns = zip(token_texts(tokenizer, ids), logprobs, ref_logprobs, kl, strict=True)
    return [{"text": text, "logprob": p, "ref_logprob": q, "kl": nats} for text, p, q, nats in columns]


def figures_of(own: Samples, other: Samples, events: list[Event]) -> dict[str, Any]:
    """The figures of a model on held-out prompts by the keys of `eval --json`, with the KL of the other one to it.

    KL in nats; scores are raw, over what was scored. `events` gets what is left out.
    """
    if own.failures:
        events.append(GoldFailed(own.failures[0]))
    known, golds = ([score for score in each if not math.isnan(score)] for each in (own.scores, own.gold))
    unscored = len(own.scores) - len(known)
    if math.inf in map(abs, known):
        events.append(EvalScores())
        known = []
    return {
        "kl_token": sum(own.kl) / sum(own.lengths),
        "kl_sequence": fmean(own.kl),
        "forward_kl_token": sum(other.kl) / sum(other.lengths),
        "scores": fmean(known) if known else None,
        "unscored": unscored,
        "gold": fmean(golds) if golds and not own.failures else None,
        "length": fmean(own.lengths),
        "eos_rate": fmean(own.ended),
        "distinct_2": distinct_2(own.texts),
    }


def errors_of(samples: Samples) -> dict[str, float | None]:
    """Standard errors of the figures on held-out prompts, by the keys of `figures_of`; None with a single prompt.

    Prompts are the independent draws, each with all of its responses, which are alike.
    """
    prompts, ones = samples.prompts, [1.0] * len(samples.texts)
    pairs = {prompt: list[tuple[str, str]]() for prompt in prompts}
    for prompt, text in zip(prompts, samples.texts, strict=True):
        pairs[prompt] += _word_pairs(text)
    prompts_with = Counter(pair for each in pairs.values() for pair in set(each))
    own = [sum(prompts_with[pair] == 1 for pair in set(each)) for each in pairs.values()]  # that no other prompt has

    def error(values: Sequence[float], counts: Sequence[float] = ones) -> float | None:
        """Of a mean over the responses that have a value: all, the first ones, or those that are no NaN."""
        sums, sizes = dict.fromkeys(prompts, 0.0), dict.fromkeys(prompts, 0.0)
        for prompt, value, count in zip(prompts, values, counts, strict=False):
            if not math.isnan(value):
                sums[prompt] += value
                sizes[prompt] += count
        return standard_error(list(sums.values()), list(sizes.values()))

    return {
        "scores": error(samples.scores),
        "gold": error(samples.gold),
        "kl_token": error(samples.kl, samples.lengths),
        "kl_sequence": error(samples.kl),
        "length": error(samples.lengths),
        "eos_rate": error(samples.ended),
        "distinct_2": standard_error(own, list(map(len, pairs.values())), len(prompts_with)),
    }


def text_errors(parts: Sequence[TextSums]) -> dict[str, float | None]:
    """Standard errors over the documents, by the keys of `Perplexity`."""
    nats, tokens = zip(*(each for part in parts for each in part.each), strict=True)
    return {
        "perplexity": standard_error(nats, tokens, of=safe_exp),
        "nats_per_token": standard_error(nats, tokens),
    }


def standard_error(
    amounts: Sequence[float],
    counts: Sequence[float],
    total: float | None = None,
    of: Callable[[float], float] = float,
) -> float | None:
    """Of `of(sum(amounts) / sum(counts))`, by leaving out each draw in turn (jackknife); None where unknown.

    amounts, counts: of each independent draw. `total`: in place of the first sum, where an amount is what is missing
    without its draw.
    """
    pairs = list(zip(amounts, counts, strict=False))
    total = sum(amounts) if total is None else total
    count = sum(n for _, n in pairs)
    left = [of((total - x) / (count - n)) if count > n else math.nan for x, n in pairs]
    return math.sqrt((len(left) - 1) * pvariance(left)) if left[1:] and all(map(math.isfinite, left)) else None
