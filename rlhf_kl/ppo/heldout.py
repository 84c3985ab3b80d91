"""The held-out evaluation: a policy beside its reference, on held-out prompts and texts.

Training, `doctor`, `eval`, `scale` and `generate` measure by it, so a figure has one definition and one key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from statistics import fmean, pvariance
from typing import Any

import torch

from rlhf_kl.distributed import Ranks
from rlhf_kl.events import EvalScores, Event, ScorerFailed
from rlhf_kl.models.lm import LM
from rlhf_kl.models.perplexity import TextSums, perplexity_of, safe_exp, text_sums
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.masked import float64
from rlhf_kl.ppo import rollout
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.seeding import library_state_kept, uniforms
from rlhf_kl.sharding import layer_by_layer
from rlhf_kl.types import REWARD, Prompts, Responses, Sampled, Sampling

SHOWN = 2  # held-out prompts whose responses people read
EACH = 8  # responses to each of them: people read that of the median score
NO_SCORERS = Scorers()
STDERR = "_stderr"  # behind the key of a figure: the key of its standard error

Drawn = list[tuple[Responses, Sampled]]  # batches


@dataclass
class Samples:
    """A model's responses to held-out prompts: one entry for each."""

    kl: list[float] = field(default_factory=list)  # exact KL of this model to the other one, nats
    lengths: list[int] = field(default_factory=list)  # tokens, EOS included
    ended: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # NaN = not scored
    tokens: list[list[list[Any]]] = field(default_factory=list)  # what `token_rows` reads
    prompts: list[Hashable] = field(default_factory=list)  # equal for responses to the same prompt
    watched: dict[str, list[float]] = field(default_factory=dict)  # scores of each scorer that never trains
    failures: dict[str, str] = field(default_factory=dict)  # of these scorers

    def pick(self, rows: Sequence[int]) -> Samples:
        """The figures of these responses, as far as they are known."""
        names = ("kl", "lengths", "ended", "texts", "scores", "tokens", "prompts")
        columns = {name: getattr(self, name) for name in names}
        picked: Any = {name: [each[i] for i in rows if i < len(each)] for name, each in columns.items()}
        watched = {name: [each[i] for i in rows if i < len(each)] for name, each in self.watched.items()}
        return Samples(**picked, watched=watched, failures=self.failures)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of all ranks."""
        names = [column.name for column in fields(cls) if column.name not in ("watched", "failures")]
        columns: Any = {name: [x for part in parts for x in getattr(part, name)] for name in names}
        scorers = dict.fromkeys(name for part in parts for name in part.watched)
        watched = {name: [x for part in parts for x in part.watched.get(name, ())] for name in scorers}
        return cls(**columns, watched=watched, failures=dict(one for part in parts for one in part.failures.items()))


def asked(prompts: Prompts) -> tuple[Prompts, list[int]]:
    """The prompts as they are asked, each of the first `SHOWN` `EACH` times in a row; where its first response is."""
    each = [EACH if i < SHOWN else 1 for i in range(len(prompts))]
    return prompts.pick([i for i, count in enumerate(each) for _ in range(count)]), [0, *accumulate(each)][:-1]


class HeldOut:
    """Held-out prompts and texts, and the two models that are measured on them.

    Three steps measure a model: `draw` its responses, `measure` them, `score` them. The noise that decides the tokens
    depends on seed, `purpose` and the prompt's row, so only the models differ.
    """

    def __init__(
        self,
        policy: LM,
        reference: LM | None,
        tokenizer: Any,
        sampling: Sampling,
        prompts: Prompts,
        *,
        texts: Sequence[str] = (),
        scorers: Scorers = NO_SCORERS,
        seed: int = 0,
        purpose: str = "evaluation",
        batch: int = 1,
        several: bool = False,
        ranks: Ranks | None = None,
        engine: rollout.Engine | None = None,
        trained_on: bool = False,
    ) -> None:
        """`several`: to the first prompts, as `asked`; the figures are of the first response to each prompt.

        `trained_on`: the prompts are those of the training, too few to hold some out.

        `batch`: responses of all ranks that are drawn together, or more where they are short. `engine`: draws them, in
        place of the models.
        """
        self.policy, self.reference, self.tokenizer, self.sampling = policy, reference, tokenizer, sampling
        self.texts, self.scorers, self.engine, self.ranks = texts, scorers, engine, ranks or Ranks()
        self.trained_on = trained_on
        self.prompts, firsts = asked(prompts) if several else (prompts, list(range(len(prompts))))
        self.firsts = firsts  # where the figures' responses are: their noise depends on no others
        size = rollout.rows_at_once(batch // self.ranks.count, prompts, sampling) if len(prompts) else batch
        others = sorted({*range(len(self.prompts))} - {*firsts})
        noise = torch.empty(len(self.prompts), sampling.max_new_tokens, dtype=torch.float64)
        for places, name in ((firsts, purpose), (others, f"{purpose}/typical")):
            noise[places] = uniforms(len(places), sampling.max_new_tokens, seed, name)
        mine = list(self.ranks.mine(range(len(self.prompts))))
        self.share = len(mine)  # of this process
        # All read sharded models equally often: where a process has a prompt less, it answers one more, for nothing.
        mine += [0] * (-(-len(self.prompts) // self.ranks.count) - len(mine))
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        self.batches = [(self.prompts.pick(rows), noise[rows]) for rows in batches]  # of this process
        self.kept: Drawn = []  # the reference's responses, which are the same every time

    # ---- the three steps, of this process's part of the prompts; all processes take them together

    def draw(self, model: LM) -> Drawn:
        """One response of a model to each prompt, in batches."""

        def drawn() -> Drawn:
            every = (rollout.sample(sampler, *each, self.sampling, self.tokenizer) for each in self.batches)
            return [(responses, sampled._replace(states=None)) for responses, sampled in every]  # large, and not read

        with rollout.sampler_of(model, self.engine, self.ranks) as sampler:
            return self.ranks.run(drawn)

    def measure(self, drawn: Drawn, model: LM, other: LM | None, advance: Callable[[int], None]) -> Samples:
        """Responses of a model, with its exact KL to the other one.

        What a policy has forgotten follows KL(reference || policy) on the reference's samples (Shenfeld et al. 2025,
        RL's Razor, 2509.04259).
        """
        made, critic = Samples(), ActorCritic(model)
        states = None if other is None else ReferenceStates(other, once=True)
        for responses, sampled in drawn:
            made.lengths += sampled.mask.sum(1).tolist()
            made.ended += sampled.ended.tolist()
            made.texts += responses.texts
            made.prompts += map(tuple, responses.prompts.ids)
            if states is not None:
                layout = rollout.response_layout(responses.prompts.ids, sampled, model.device)
                stats, _ = rollout.measure(critic, states, layout, self.sampling.temperature)
                made.kl += float64(stats.exact_kl).sum(1).tolist()
                columns = (sampled.ids, stats.logprobs, stats.ref_logprobs, stats.exact_kl)
                made.tokens += [[column[i][live].tolist() for column in columns] for i, live in enumerate(sampled.mask)]
            advance(len(responses.texts))
        return made

    def score(self, samples: Samples, drawn: Drawn) -> None:
        """Score the responses. Errors: InputError from a reward; that of another scorer is in `samples.failures`."""
        read = self.scorers.together([responses for responses, _ in drawn])

        def score() -> None:
            for responses in read:
                found = self.scorers.judge(responses, samples.failures)
                samples.scores += found.pop(REWARD, [])
                for name, scores in found.items():
                    samples.watched.setdefault(name, []).extend(scores)

        self.ranks.run(score, scores=True)

    # ---- of all processes

    def samples(
        self, *, same: bool = False, advance: Callable[[int], None] = lambda _: None
    ) -> tuple[Samples, Samples]:
        """Of policy and reference (if any): drawn, measured and scored. It changes no state.

        `same`: the reference counts as the policy, which began as it: its samples are those of both. The reference's
        are drawn once, and scored only then. `advance(n)` is called after every n responses.
        Errors: InputError from a reward.
        """
        with library_state_kept(), self.scorers.kept():
            mine = [samples.pick(range(self.share)) for samples in self._own_part(same, advance)]
        own, other = map(Samples.joined, zip(*self.ranks.all(mine), strict=True))
        return own, other

    def _own_part(self, same: bool, advance: Callable[[int], None]) -> tuple[Samples, Samples]:
        first, reference, other = not self.kept, self.reference, Samples()
        policy = reference if same and reference is not None else self.policy
        if first and reference is not None:
            self.kept = self.draw(reference)
        if reference is not None and not same:
            other = self.measure(self.kept, reference, policy, advance)
        drawn = self.kept if same else self.draw(policy)
        own = self.measure(drawn, policy, reference, advance)
        self.score(own, drawn)
        if first and not same:
            self.score(other, self.kept)
        return own, own if same else other

    def perplexity(
        self, model: LM, tokenizer: Any = None, advance: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Figures of a model on the texts, by the keys of `Perplexity`, with standard errors over the documents."""
        tokenizer = tokenizer or self.tokenizer
        with library_state_kept(), layer_by_layer(model):
            sums = text_sums(model, tokenizer, self.ranks.mine(self.texts), advance=advance)
        return text_figures(self.ranks.all(sums))


# ---- figures


def text_figures(parts: Sequence[TextSums]) -> dict[str, Any]:
    """The figures of all documents, and standard errors over them. Errors: InputError if no token was scored."""
    nats, tokens = zip(*(each for part in parts for each in part.each), strict=True)
    return asdict(perplexity_of(parts)) | {
        f"perplexity{STDERR}": standard_error(nats, tokens, of=safe_exp),
        f"nats_per_token{STDERR}": standard_error(nats, tokens),
    }


def figures_of(own: Samples, other: Samples, events: list[Event], more: Samples | None = None) -> dict[str, Any]:
    """The figures of a model's samples, with its KL from the other one's, and their standard errors.

    KL in nats; scores are raw, over what was scored, of `more` samples too. `events` gets what is left out.
    """
    scored = own if more is None else Samples.joined([own, more])
    events += [ScorerFailed(name, failure) for name, failure in scored.failures.items()]
    columns, errors = {"scores": scored.scores, **scored.watched}, errors_of(scored)
    known = {name: [score for score in scores if not math.isnan(score)] for name, scores in columns.items()}
    unscored = len(scored.scores) - len(known["scores"])
    if math.inf in map(abs, known["scores"]):
        events.append(EvalScores())
        known["scores"] = []
    return {
        "kl_token": sum(own.kl) / sum(own.lengths),
        "kl_sequence": fmean(own.kl),
        "forward_kl_token": sum(other.kl) / sum(other.lengths),
        **{name: fmean(scores) if scores and name not in scored.failures else None for name, scores in known.items()},
        "unscored": unscored,
        "length": fmean(own.lengths),
        "eos_rate": fmean(own.ended),
        "distinct_2": distinct_2(own.texts),
        **errors_of(own),
        **{f"{name}{STDERR}": errors[f"{name}{STDERR}"] for name in columns},
        f"forward_kl_token{STDERR}": errors_of(other)[f"kl_token{STDERR}"],
    }


def own_figures(own: Samples) -> dict[str, Any]:
    """Of the reference: the figures that need no second model."""
    names = ("scores", *own.watched, "length", "eos_rate", "distinct_2")
    figures = figures_of(own, own, [])
    return {key: figures[key] for name in names for key in (name, f"{name}{STDERR}")}


def errors_of(samples: Samples) -> dict[str, float | None]:
    """Standard errors of the figures of samples; None with a single prompt.

    Prompts are the independent draws, each with all of its responses, which are alike.
    """
    draws: dict[Hashable, list[int]] = {}
    for i, prompt in enumerate(samples.prompts):
        draws.setdefault(prompt, []).append(i)
    groups, ones = list(draws.values()), [1.0] * len(samples.texts)
    pairs = [[pair for i in rows for pair in _word_pairs(samples.texts[i])] for rows in groups]
    prompts_with = Counter(pair for each in pairs for pair in set(each))
    own = [sum(prompts_with[pair] == 1 for pair in set(each)) for each in pairs]  # that no other prompt has
    errors = {
        "scores": error_of_groups(groups, samples.scores, ones),
        **{name: error_of_groups(groups, scores, ones) for name, scores in samples.watched.items()},
        "kl_token": error_of_groups(groups, samples.kl, samples.lengths),
        "kl_sequence": error_of_groups(groups, samples.kl, ones),
        "length": error_of_groups(groups, samples.lengths, ones),
        "eos_rate": error_of_groups(groups, samples.ended, ones),
        "distinct_2": standard_error(own, list(map(len, pairs)), len(prompts_with)),
    }
    return {f"{name}{STDERR}": error for name, error in errors.items()}


def error_of_groups(groups: Sequence[Sequence[int]], values: Sequence[float], counts: Sequence[float]) -> float | None:
    """Of a mean over the responses that have a value: all, the first ones, or those that are no NaN."""
    known = [[i for i in rows if i < len(values) and not math.isnan(values[i])] for rows in groups]
    sums, sizes = ([sum(column[i] for i in rows) for rows in known] for column in (values, counts))
    return standard_error(sums, sizes)


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


def distinct_2(texts: Sequence[str]) -> float | None:
    """Share of pairs of words that are distinct, over all texts (Li et al. 2016, 1510.03055); None without a pair."""
    pairs = [pair for text in texts for pair in _word_pairs(text)]
    return len(set(pairs)) / len(pairs) if pairs else None


def _word_pairs(text: str) -> list[tuple[str, str]]:
    return list(pairwise(text.split()))
