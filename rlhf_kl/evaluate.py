"""What a policy is worth: held-out perplexity, and its figures on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.memory import fitting_batches
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.load import context_length
from rlhf_kl.models.text import encode_all, first_token_bytes
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.float64 import float64
from rlhf_kl.rewards.functions import GOLD_FAILED, GoldScorer, gold_scores_of, score_responses
from rlhf_kl.rollout.collect import Responses, measure, respond, response_layout
from rlhf_kl.rollout.reference import ReferenceStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.trainers.sft import negative_log_likelihood
from rlhf_kl.types import PromptBatch, RewardFn, Sampling

ROWS = 32
DEFAULT_WINDOW = 1024  # for a model whose config names no context length


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of documents, token-weighted. The field names are the keys of `eval --json`."""

    perplexity: float
    nats_per_token: float
    bits_per_byte: float  # UTF-8 bytes
    tokens: int  # scored ones
    bytes: int  # of the scored tokens
    documents: int


@dataclass(frozen=True)
class Window:
    """A stretch of a document: `ids` are read, those from `first` on are scored."""

    ids: list[int]
    first: int


def windows(ids: Sequence[int], size: int) -> Iterator[Window]:
    """Windows of at most `size` tokens that overlap by half, each token but the first scored once.

    The first token of a document has nothing in front of it, so it is never scored.
    """
    start, scored = 0, 1
    while scored < len(ids):
        end = min(len(ids), start + size)
        yield Window(list(ids[start:end]), scored - start)
        scored = end
        start = end - size // 2


@torch.no_grad()
def perplexity(
    lm: TransformersLM,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    window: int | None = None,
    rows: int = ROWS,
    advance: Callable[[int], None] | None = None,
) -> Perplexity:
    """exp(total nll / total scored tokens) at temperature 1; bos in front where there is one, eos not scored.

    Without a bos a document's first token has nothing in front of it: neither its nats nor its bytes count.

    `window`: most tokens in one row (default: the model's context); `rows` in one pass, fewer where memory is full;
    `advance(n)` is called after every n windows. Errors: InputError where nothing can be scored; MemoryFull.
    """
    limit = window or context_length(lm.model) or DEFAULT_WINDOW
    pieces = [piece for ids in encode_all(tokenizer, texts) for piece in windows(ids, limit)]
    if not pieces:
        raise InputError("eval.texts: no document has a token to score")
    pieces.sort(key=lambda piece: len(piece.ids))

    def read(start: int, stop: int) -> tuple[float, int]:
        group = pieces[start:stop]
        loss, tokens = negative_log_likelihood(lm, [piece.ids for piece in group], [piece.first for piece in group])
        if advance:
            advance(len(group))
        return float(loss), tokens

    total, count = 0.0, 0
    for loss, tokens in fitting_batches(len(pieces), rows, read, "shorter texts to evaluate on need less"):
        total, count = total + loss, count + tokens
    size = sum(len(text.encode()) - first_token_bytes(tokenizer, text) for text in texts)
    nats = total / count
    return Perplexity(
        perplexity=math.exp(nats) if nats < 700 else math.inf,
        nats_per_token=nats,
        bits_per_byte=total / math.log(2) / size,
        tokens=count,
        bytes=size,
        documents=len(texts),
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
    scores: float | None  # raw, of the reward function
    gold: float | None
    length: float  # tokens, EOS included
    eos_rate: float
    distinct_2: float


def policy_figures(
    policy: TransformersLM,
    reference: TransformersLM,
    prompts: PromptBatch,
    seed: int,
    sampling: Sampling,
    tokenizer: Any,
    reward: RewardFn | None = None,
    gold: GoldScorer | None = None,
    batch_size: int = ROWS,
    report: Callable[[str], None] = lambda _: None,
) -> PolicyFigures:
    """Sample one response to each prompt, at most `batch_size` at a time, and measure; `seed` fixes the samples.

    A figure is None where a reward model's score is not finite; `report` is told so. Errors: InputError where a
    function misbehaves.
    """
    noise = uniforms(len(prompts), sampling.max_new_tokens, seed, "evaluation")
    model, states = ActorCritic(policy), ReferenceStates(reference)
    kl, lengths, ended, scores, golds = [], [], [], [], []
    texts: list[str] = []

    def respond_and_measure(start: int, stop: int) -> tuple[Responses, Tensor]:
        batch = prompts.part(start, stop)
        made = respond(policy, batch, noise[start:stop], sampling, tokenizer)
        return made, measure(model, states, response_layout(batch, made.sampled), sampling.temperature).exact_kl

    change = "a lower rollout.max_new_tokens or shorter prompts need less"
    for (batch, sampled, responses), exact_kl in fitting_batches(len(prompts), batch_size, respond_and_measure, change):
        kl.append(float64(exact_kl).sum(1))
        lengths.append(sampled.mask.sum(1))
        ended.append(sampled.ended)
        texts += responses
        if reward is not None:
            found = score_responses(reward, batch.texts, responses, "function")
            scores.append(found.values.cpu()[found.scored.cpu()])
        checked, failure = gold_scores_of(gold, batch.texts, responses)
        golds += checked or []
        if failure is not None:
            report(f"{GOLD_FAILED}: {failure}: left out")
            gold, golds = None, []
    if scores and not bool(torch.isfinite(torch.cat(scores)).all()):
        report("eval-scores: a score of the reward model was not finite: left out")
        scores = []
    per_response, tokens = torch.cat(kl), float64(torch.cat(lengths))
    return PolicyFigures(
        kl_token=float(per_response.sum() / tokens.sum()),
        kl_sequence=float(per_response.mean()),
        scores=float(torch.cat(scores).mean()) if any(map(len, scores)) else None,
        gold=sum(golds) / len(golds) if golds else None,
        length=float(tokens.mean()),
        eos_rate=float(float64(torch.cat(ended)).mean()),
        distinct_2=distinct_n(texts),
    )
