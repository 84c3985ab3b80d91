"""Evaluates a policy: held-out perplexity, and its figures on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.memory import fitting_batches
from rlhf_kl.models.lm import LM, negative_log_likelihood
from rlhf_kl.models.load import context_length
from rlhf_kl.models.text import encode_all, first_token_bytes
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.masked import float64
from rlhf_kl.rewards.scorer import GOLD, REWARD, Scorers
from rlhf_kl.rollout.collect import Responses, measure, respond, response_layout
from rlhf_kl.rollout.states import ReferenceStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch, Sampling

ROWS = 32
DEFAULT_WINDOW = 1024  # for a model whose config names no context length
NO_SCORERS = Scorers()


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of documents, token-weighted. The field names are the keys of `eval --json`."""

    perplexity: float
    nats_per_token: float
    bits_per_byte: float  # UTF-8 bytes
    tokens: int  # scored ones
    bytes: int  # of the scored tokens
    documents: int


CachedSamples = dict[tuple[int, int], Responses]  # by the first prompt and the one after the last


@dataclass(frozen=True)
class Window:
    """A stretch of a document: `ids` are read, those from `first` on are scored."""

    ids: list[int]
    first: int


def windows(ids: Sequence[int], size: int) -> Iterator[Window]:
    """Windows of at most `size` tokens that overlap by half, each token but the first scored once.

    The first token of a document has no context, so it is never scored.
    """
    start, scored = 0, 1
    while scored < len(ids):
        end = min(len(ids), start + size)
        yield Window(list(ids[start:end]), scored - start)
        scored = end
        start = end - size // 2


class TextSums(NamedTuple):
    """The sums behind the perplexity of some documents."""

    nats: float
    tokens: int
    bytes: int
    documents: int


@torch.no_grad()
def text_sums(
    lm: LM,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    rows: int = ROWS,
    advance: Callable[[int], None] | None = None,
) -> TextSums:
    """Sums over some documents: with a bos in front if the tokenizer has one; eos is not scored.

    Without a bos a document's first token has no context: neither its nats nor its bytes count.

    `rows` in one pass, fewer where memory is full; `advance(n)` is called after every n windows. Errors: MemoryFull.
    """
    limit = context_length(lm.model) or DEFAULT_WINDOW
    pieces = [piece for ids in encode_all(tokenizer, texts, bos=True) for piece in windows(ids, limit)]
    pieces.sort(key=lambda piece: len(piece.ids))

    def read(start: int, stop: int) -> tuple[float, int]:
        group = pieces[start:stop]
        loss, tokens = negative_log_likelihood(lm, [piece.ids for piece in group], [piece.first for piece in group])
        if advance:
            advance(len(group))
        return float(loss), tokens

    total, count = 0.0, 0
    for loss, tokens in fitting_batches(len(pieces), rows, read, "use shorter texts to evaluate on"):
        total, count = total + loss, count + tokens
    size = sum(len(text.encode()) - first_token_bytes(tokenizer, text) for text in texts)
    return TextSums(total, count, size, len(texts))


def perplexity_of(parts: Sequence[TextSums]) -> Perplexity:
    """exp(total nll / total scored tokens) of all documents together. Errors: InputError if no token was scored."""
    total, count, size, documents = (sum(column) for column in zip(*parts, strict=True))
    if not count:
        raise InputError("eval.texts: no document has a token to score")
    nats = total / count
    return Perplexity(
        perplexity=math.exp(nats) if nats < 700 else math.inf,
        nats_per_token=nats,
        bits_per_byte=total / math.log(2) / size,
        tokens=int(count),
        bytes=int(size),
        documents=int(documents),
    )


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Share of n-grams of words that are distinct, over all texts (Li et al. 2016, 1510.03055)."""
    grams = [tuple(words[i : i + n]) for words in (text.split() for text in texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class PolicyFigures:
    """A policy on held-out prompts. The field names are the keys of `eval --json`."""

    kl_token: float  # exact KL to the reference, nats, token-weighted
    kl_sequence: float
    forward_kl_token: float  # exact KL of the reference to the policy, on the reference's own samples: forgetting
    scores: float | None  # raw, of the reward function, over what it scored
    unscored: int  # responses for which it returned None
    gold: float | None
    length: float  # tokens, EOS included
    eos_rate: float
    distinct_2: float


@dataclass
class PolicySamples:
    """The samples behind a policy's figures: one entry for each response."""

    kl: list[float] = field(default_factory=list)  # exact KL, nats
    forward_kl: list[float] = field(default_factory=list)  # of the reference to the policy, on the reference's samples
    forward_lengths: list[int] = field(default_factory=list)  # tokens of those
    lengths: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # NaN = not scored
    gold: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the gold scorer


def policy_samples(
    policy: LM,
    reference: LM,
    prompts: PromptBatch,
    part: range,
    seed: int,
    sampling: Sampling,
    tokenizer: Any,
    scorers: Scorers = NO_SCORERS,
    batch_size: int = ROWS,
    advance: Callable[[int], None] = lambda _: None,
    cached: CachedSamples | None = None,
) -> PolicySamples:
    """One response to each prompt of `part`, at most `batch_size` at a time; it does not depend on the parts.

    The reference samples too. What a policy has forgotten follows KL(reference || policy) on such samples (Shenfeld et
    al. 2025, RL's Razor, 2509.04259). `cached` keeps these samples, which are the same every time, for the next call.
    `advance(n)` is called after every n responses, of the reference and then of the policy.
    Errors: InputError from a reward function.
    """
    noise = uniforms(len(prompts), sampling.max_new_tokens, seed, "evaluation")[part.start : part.stop]
    prompts = prompts.part(part.start, part.stop)
    made = PolicySamples()

    def sampled_by(one: LM, other: LM, before: CachedSamples) -> Iterator[tuple[Responses, Tensor]]:
        """Batches of responses of `one`, and its exact KL to `other` at their tokens."""
        model, states = ActorCritic(one), ReferenceStates(other)

        def respond_and_measure(start: int, stop: int) -> tuple[Responses, Tensor]:
            batch = prompts.part(start, stop)
            if (start, stop) not in before:
                made = respond(one, batch, noise[start:stop], sampling, tokenizer)
                before[start, stop] = made._replace(sampled=made.sampled._replace(states=None))  # large, and not read
            responses = before[start, stop]
            layout = response_layout(batch, responses.sampled)
            return responses, measure(model, states, layout, sampling.temperature).exact_kl

        change = "use a lower rollout.max_new_tokens or shorter prompts"
        return fitting_batches(len(prompts), batch_size, respond_and_measure, change)

    for (_, sampled, _), exact_kl in sampled_by(reference, policy, {} if cached is None else cached):
        advance(len(sampled.mask))
        made.forward_kl += float64(exact_kl).sum(1).tolist()
        made.forward_lengths += sampled.mask.sum(1).tolist()
    for (batch, sampled, responses), exact_kl in sampled_by(policy, reference, {}):
        made.kl += float64(exact_kl).sum(1).tolist()
        made.lengths += sampled.mask.sum(1).tolist()
        made.ended += sampled.ended.tolist()
        made.texts += responses
        advance(len(responses))
        values, failures = scorers(batch.texts, responses)
        made.scores += values.get(REWARD, torch.empty(0)).tolist()
        made.gold += values.get(GOLD, torch.empty(0)).tolist()
        if failures:
            scorers, made.failures = scorers.trained, failures
    return made


def figures_of(parts: Sequence[PolicySamples], facts: dict[str, Any]) -> PolicyFigures:
    """The figures of all samples together; `facts` gets what is left out, and why, for `monitors.worded`."""
    kl, forward, forward_lengths, lengths, ended, texts, scores, gold, failures = (
        [value for part in parts for value in getattr(part, column.name)] for column in fields(PolicySamples)
    )
    if failures:
        facts["gold-failed"] = {"failure": failures[0]}
    known, golds = ([score for score in each if not math.isnan(score)] for each in (scores, gold))
    unscored = len(scores) - len(known)
    if math.inf in map(abs, known):
        facts["eval-scores"] = {}
        known = []
    return PolicyFigures(
        kl_token=sum(kl) / sum(lengths),
        kl_sequence=fmean(kl),
        forward_kl_token=sum(forward) / sum(forward_lengths),
        scores=fmean(known) if known else None,
        unscored=unscored,
        gold=fmean(golds) if golds and not failures else None,
        length=fmean(lengths),
        eos_rate=fmean(ended),
        distinct_2=distinct_n(texts),
    )
