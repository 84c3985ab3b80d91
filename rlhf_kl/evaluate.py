"""What a policy is worth: held-out perplexity, and its figures on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.models.actor_critic import ActorCritic, position_ids
from rlhf_kl.models.load import context_length
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.ops.logprobs import chosen_logprobs
from rlhf_kl.reward_functions import GoldScorer, checked_scores, gold_scores_of
from rlhf_kl.rollout.collect import Sampling, draw, measure, response_texts
from rlhf_kl.types import PromptBatch, RewardFn

ROWS = 32
DEFAULT_WINDOW = 1024  # for a model whose config names no context length


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of documents, token-weighted. The field names are the keys of `eval --json`."""

    perplexity: float
    nats_per_token: float
    bits_per_byte: float  # UTF-8 bytes
    tokens: int  # scored ones
    bytes: int
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
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    window: int | None = None,
    rows: int = ROWS,
    advance: Callable[[int], None] | None = None,
) -> Perplexity:
    """exp(total nll / total scored tokens) at temperature 1; bos in front, eos not scored.

    `window` is the most tokens read at once (default: the model's context). `advance(n)` is told of every n
    windows done. Errors: InputError where nothing can be scored.
    """
    limit = window or context_length(model) or DEFAULT_WINDOW
    device = next(model.parameters()).device
    pieces = [piece for ids in encode_all(tokenizer, texts) for piece in windows(ids, limit)]
    if not pieces:
        raise InputError("eval.texts: no document has a token to score")
    pieces.sort(key=lambda piece: len(piece.ids))
    total, count = 0.0, 0
    for start in range(0, len(pieces), rows):
        group = pieces[start : start + rows]
        ids, mask = pad([piece.ids for piece in group], tokenizer.pad_token_id, left=False)
        ids, mask = ids.to(device), mask.to(device)
        first = torch.tensor([piece.first for piece in group], device=device).unsqueeze(1)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False).logits[
            :, :-1
        ]
        scored = mask[:, 1:] & (torch.arange(1, ids.shape[1], device=device) >= first)
        logprobs = chosen_logprobs(logits, ids[:, 1:])
        total -= float(logprobs[scored].double().sum())
        count += int(scored.sum())
        if advance:
            advance(len(group))
    size = sum(len(text.encode()) for text in texts)
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
    model: ActorCritic,
    reference: Any,
    prompts: PromptBatch,
    noise: Tensor,
    sampling: Sampling,
    tokenizer: Any,
    reward: RewardFn | None = None,
    gold: GoldScorer | None = None,
) -> PolicyFigures:
    """Sample one response to each prompt and measure; `noise` (B, max_new_tokens) fixes the samples."""
    device = next(reference.parameters()).device
    sampled = draw(model.policy, prompts, noise, sampling, device)
    measured = measure(model, reference, prompts, sampled, sampling.temperature)
    responses = response_texts(tokenizer, sampled)
    per_response = measured.exact_kl.double().sum(1)
    scores = checked_scores(reward, prompts.texts, responses, "function") if reward else None
    golds = gold_scores_of(gold, prompts.texts, responses)
    return PolicyFigures(
        kl_token=float(per_response.sum() / sampled.mask.sum()),
        kl_sequence=float(per_response.mean()),
        scores=float(scores.mean()) if scores is not None else None,
        gold=sum(golds) / len(golds) if golds is not None else None,
        length=float(sampled.mask.sum(1).double().mean()),
        eos_rate=float(sampled.ended.double().mean()),
        distinct_2=distinct_n(responses),
    )
