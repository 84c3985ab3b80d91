"""Rows of `samples.jsonl`: responses token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from rlhf_kl.models.tokens import decode_behind, special_ids, text_of_each
from rlhf_kl.monitors.kl_shares import EOS, SPECIAL, TOKEN, Part, kl_parts
from rlhf_kl.ppo.heldout import SHOWN, HeldOut, Samples
from rlhf_kl.run.log import HELD_OUT, NOT_HELD_OUT
from rlhf_kl.types import REWARD, RolloutBatch

IN_ORDER = 4  # the first responses of the batch: not selected, so they are typical
BY_KL = 2  # those whose own KL is largest


def sample_rows(
    step: int,
    rollout: RolloutBatch,
    tokenizer: Any,
    columns: Sequence[str] = (),
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The first responses of the batch, then those with the largest KL; `chosen` is the reason.

    `columns`: data columns that scorers read; `extra`: values that scorers logged for each response.
    """
    of_tokens = (rollout.response_ids, rollout.logprobs, rollout.ref_logprobs, rollout.exact_kl)
    first = list(range(min(IN_ORDER, len(rollout))))
    ranked = rollout.exact_kl.sum(1).argsort(descending=True, stable=True).tolist()
    for chosen, rows in (("first", first), ("largest kl", [i for i in ranked if i not in first][:BY_KL])):
        for i in rows:
            yield {
                "step": step,
                "prompt": rollout.prompts[i],
                **_columns(rollout.rows[i], columns, {name: values[i] for name, values in (extra or {}).items()}),
                "response": rollout.responses[i],
                "chosen": chosen,
                "score": score_at(rollout.scores.get(REWARD, ()), i),
                "kl": float(rollout.exact_kl[i].sum()),
                "tokens": token_rows(tokenizer, *(column[i][rollout.mask[i]].tolist() for column in of_tokens)),
            }


def heldout_rows(
    held: HeldOut, own: Samples, other: Samples | None, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What the policy answers to the first held-out prompts, and where it is given what the reference answers.

    Of all responses to a prompt the one of the median score is shown, with the mean score; where none or one is scored,
    the first.
    """
    prompts, firsts, tokenizer = held.prompts, held.firsts, held.tokenizer
    ends = [*firsts[1:], len(prompts)]

    def response(samples: Samples, i: int, with_tokens: bool = False) -> dict[str, Any]:
        every = range(firsts[i], ends[i])
        scores = [math.nan if (score := score_at(samples.scores, j)) is None else score for j in every]
        order = from_median(scores)
        j = every[order[0] if order[1:] else 0]
        row = {"response": samples.texts[j], "score": score_at(samples.scores, j)}
        row |= {name: score_at(each, j) for name, each in samples.watched.items()}
        if order[1:]:
            row |= {"score_mean": fmean(scores[k] for k in order), "of": len(order)}
        return row | ({"kl": samples.kl[j], "tokens": token_rows(tokenizer, *samples.tokens[j])} if with_tokens else {})

    # One prompt that stands for several is shown once.
    texts = dict.fromkeys(prompts.texts[first] for first in firsts[:SHOWN])
    chosen = NOT_HELD_OUT if held.trained_on else HELD_OUT
    return [
        {"prompt": prompt, "chosen": chosen, **_columns(prompts.rows[firsts[i]], columns, {})}
        | response(own, i, with_tokens=True)
        | ({"reference": response(other, i)} if other is not None else {})
        for i, prompt in enumerate(texts)
    ]


def token_parts(held: HeldOut, own: Samples) -> list[Part]:
    """The KL of responses by token and by place (`kl_parts`): those of the figures."""
    ids = sorted({token for each in own.tokens for token in each[0]})
    special = dict.fromkeys(special_ids(held.tokenizer), SPECIAL) | dict.fromkeys(held.sampling.eos_ids, EOS)
    texts = text_of_each(held.tokenizer, ids)
    return kl_parts(own.tokens, {i: (special.get(i, TOKEN), text) for i, text in zip(ids, texts, strict=True)})


def score_at(scores: Sequence[float] | Tensor, row: int) -> float | None:
    """A score of many; None where there is none."""
    score = float(scores[row]) if row < len(scores) else math.nan
    return None if math.isnan(score) else score


def _columns(row: Mapping[str, Any], names: Sequence[str], logged: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    shown = {**{name: row[name] for name in names if name in row}, **logged}
    return {"columns": {name: str(value) for name, value in shown.items()}} if shown else {}


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
