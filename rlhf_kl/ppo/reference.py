"""Scores of reference samples: the scale of the scores, the starting beta, and the best score gain of a KL budget."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_kl.control.tilt import (
    REACHED,
    best_of_n,
    centre_groups,
    gain_at_kl,
    has_few_values,
    kl_limit,
    solve_tilt,
    tilted,
)
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import InputError
from rlhf_kl.events import Event, ScoresClipped
from rlhf_kl.ops.masked import float64
from rlhf_kl.ppo.rollout import Sampler, sample
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.seeding import shuffled, uniforms
from rlhf_kl.types import RAW, REWARD, Responses, Sampled, Sampling, Score

MIN_ESS = 10.0
CURVE_POINTS = 24
PER_PROMPT = 8  # reference responses to one prompt: the spread that a policy can use is within prompts
LEAST_PROMPTS = 60  # where one prompt in twenty can be solved, one of sixty is among them in 95 of 100 runs
PLANS = 4  # times that all reference samples are drawn, as long as their scores are equal
ROUND = 120  # samples that are drawn before the next look at whether more are needed, at least
ENOUGH = 0.1  # standard error of log beta, and of the mean score over its spread, that needs no more samples
BLOCKS = 5  # of prompts, for the standard error of log beta
OTHERWISE = 0.1  # the starting beta where no scores tell
MUCH_CLIPPED = 0.02  # a clip of 5 cuts off less than one in a million of normalised Gaussian scores
CLEARLY = 0.75  # of the target's KL: with more the samples tell nothing that a user should change
LEAST_KL = 1e-3  # nats per sequence, where the curve of the tilt begins


class SolvedCoef(NamedTuple):
    """A starting beta from samples of the reference."""

    coef: float
    note: str = ""  # for the start: what the samples do not tell
    known: float = 1.0  # share of the target's KL that the samples suffice for; 0 = they do not tell beta


@dataclass
class ReferenceScores:
    """Shaped scores of reference samples, and the prompt of each."""

    shaped: list[float]
    groups: list[int]
    length: float  # mean tokens of a response
    clipped: float = 0.0  # share that reward.clip makes equal to other scores
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)  # the `term_figures` of a sum

    def start_events(self) -> list[Event]:
        """About the scores, before the run starts."""
        return [ScoresClipped(self.clipped)] if self.clipped > MUCH_CLIPPED else []

    def solve(self, sequence_kl: float, *, scaled: bool = False) -> SolvedCoef:
        """The beta at which tilting has this KL, or nearly the most that it can have.

        `scaled`: scores are divided by the standard deviation of their prompt's scores.

        Errors: InputError if the samples do not determine it.
        """
        scores, groups = self.to_tilt(scaled=scaled)
        if not kl_limit(scores, groups):
            note = (
                f"the {len(self.shaped)} reference samples have equal scores wherever they share a prompt, so they do "
                f"not tell beta: it starts at {OTHERWISE:g}"
            )
            return SolvedCoef(OTHERWISE, note, 0.0)
        try:
            solution = solve_tilt(scores, sequence_kl, groups=groups, min_ess=self.min_ess)
        except ValueError as error:
            raise InputError(f"kl.controller.coef: auto fails: within a prompt {error}; set a number") from error
        if sequence_kl > REACHED * solution.limit:
            known = solution.limit / sequence_kl
            if groups is not None:  # the few samples of each prompt limit the KL, not beta
                note = f"the {len(self.shaped)} reference samples tell nothing above {known:.0%} of your KL target"
                return SolvedCoef(solution.coef, note, known)
            need = f"{known:.0%} of your KL target, by {len(self.shaped)} reference samples"
            note = f"this reward may need only {need}. If the score stops rising, lower kl.target" * (known < CLEARLY)
            return SolvedCoef(solution.coef, note, 0.0)  # one tilt of all scores has no more samples there
        if not solution.extrapolated:
            return SolvedCoef(solution.coef)
        known = solution.tilt.kl / sequence_kl
        note = f"the reference samples suffice for {known:.0%} of the target's KL"
        return SolvedCoef(solution.coef, f"starting beta {solution.coef:.4g} is a guess: {note}", known)

    def to_tilt(self, *, scaled: bool = False) -> tuple[list[float], list[int] | None]:
        """The scores that a tilt weighs, and with few values the prompt of each, which is tilted by itself.

        `scaled`: divided by the standard deviation of their prompt's scores.
        """
        if not has_few_values(self.shaped, self.groups):
            return centre_groups(self.shaped, self.groups, scale=scaled), None
        order = sorted(range(len(self.groups)), key=lambda i: self.groups[i])
        shared = Counter(self.groups)
        kept = [i for i in order if shared[self.groups[i]] > 1]
        scores, groups = [self.shaped[i] for i in kept], [self.groups[i] for i in kept]
        return centre_groups(scores, groups, scale=scaled), groups

    @property
    def min_ess(self) -> float:
        """Effective samples that a tilt needs: with 10 of 1024, its gain is within 3 % of that from 8192 samples."""
        return min(MIN_ESS, len(self.shaped) / 8)

    @property
    def mean(self) -> float:
        """Mean shaped score of the reference."""
        return fmean(self.shaped)

    @property
    def mean_stderr(self) -> float:
        """Standard error of `mean`: prompts are the independent draws, or the responses if there is only one prompt."""
        groups = self.groups if len(set(self.groups)) > 1 else list(range(len(self.shaped)))
        mean = self.mean
        rests: dict[int, float] = defaultdict(float)
        for score, group in zip(self.shaped, groups, strict=True):
            rests[group] += score - mean
        squares = math.fsum(rest**2 for rest in rests.values()) * len(rests) / max(1, len(rests) - 1)
        return math.sqrt(squares) / len(groups)

    @property
    def spread(self) -> float:
        """Standard deviation of the reference's shaped scores."""
        return pstdev(self.shaped)

    def summary(self) -> dict[str, Any]:
        """The figures for `summary.json`: means, and the score gain for a KL by tilting and by best of n."""
        return {
            "scores_shaped": self.mean,
            "scores_spread": pstdev(centre_groups(self.shaped, self.groups)),  # within prompts
            "length": self.length,
            "samples": len(self.shaped),
            "terms": self.terms or None,
            "tilt": self.tilt_curve(),
            "best_of_n": [point._asdict() for point in best_of_n(self.shaped, self.groups)],
        }

    def are_enough(self, coef: Callable[[ReferenceScores], float]) -> bool:
        """Whether the mean score, and beta as `coef` computes it, would hardly change with more samples.

        The standard error of log beta is a jackknife's, over blocks of prompts. Scores with few values need all samples
        of each prompt.
        """
        numbers = {group: i % BLOCKS for i, group in enumerate(dict.fromkeys(self.groups))}
        known = len(numbers) >= 2 * BLOCKS and self.mean_stderr < ENOUGH * self.spread
        if not known or has_few_values(self.shaped, self.groups):
            return False
        logs = []
        for block in range(BLOCKS):
            left = [(x, group) for x, group in zip(self.shaped, self.groups, strict=True) if numbers[group] != block]
            shaped, groups = map(list, zip(*left, strict=True))
            logs.append(math.log(coef(ReferenceScores(shaped, groups, self.length)) or 1.0))  # 0: no penalty
        return math.sqrt(BLOCKS - 1) * pstdev(logs) < ENOUGH

    def tilt_curve(self) -> list[dict[str, float]]:
        """Beta, sequence KL and gain of the tilt, as far as the samples are reliable; may be empty."""
        scores, groups = self.to_tilt()
        try:
            first = solve_tilt(scores, LEAST_KL, groups=groups, min_ess=self.min_ess)
            last = solve_tilt(scores, first.limit, groups=groups, min_ess=self.min_ess)
        except ValueError:  # constant scores, or too few
            return []
        high, low = math.log(first.measured), math.log(last.measured)
        coefs = [math.exp(high + (low - high) * i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
        tilts = [tilted(scores, coef, groups) for coef in coefs]
        return [{"coef": coef, "kl": tilt.kl, "gain": tilt.gain} for coef, tilt in zip(coefs, tilts, strict=True)]

    def most_gain(self, kl: float) -> float | None:
        """Upper limit of the score gain at `kl` nats per sequence; None where unknown."""
        scores, groups = self.to_tilt()
        return gain_at_kl(scores, kl, groups=groups, min_ess=self.min_ess) if kl_limit(scores, groups) else None


@dataclass(frozen=True)
class ReferenceSamples:
    """Responses of the reference, and their scores."""

    scores: Tensor  # (N,) raw
    lengths: Tensor  # (N,) tokens, EOS included
    penalties: dict[str, Tensor]  # (N,) by name
    groups: list[int]  # the prompt of each
    terms: dict[str, Tensor] = field(default_factory=dict)  # (N,) raw scores of the terms of a sum, NaN = not scored

    @property
    def spread(self) -> bool:
        """Whether two scores differ."""
        return len(self.scores) > 0 and bool(self.scores.max() > self.scores.min())

    @classmethod
    def concat(cls, parts: Sequence[ReferenceSamples]) -> ReferenceSamples:
        """The samples of several parts."""
        return cls(
            torch.cat([part.scores for part in parts]),
            torch.cat([part.lengths for part in parts]),
            {name: torch.cat([part.penalties[name] for part in parts]) for name in parts[0].penalties},
            [group for part in parts for group in part.groups],
            {name: torch.cat([part.terms[name] for part in parts]) for name in parts[0].terms},
        )

    def shaped(self, shaping: ScoreShaping, *, normalize: bool) -> tuple[ReferenceScores, ScoreShaping]:
        """Their shaped scores, and the shaping with its scale fitted to them.

        Errors: InputError if all are clipped, or equal where they have to be normalised.
        """
        fitted = shaping.fit(self.scores, normalize=normalize)
        shaped: Tensor = fitted(self.scores, self.penalties)
        if fitted.clip is not None and bool(shaped.max() == shaped.min()) and self.spread:
            raise InputError(
                f"reward: clipped at {fitted.clip:g}, all {len(shaped)} reference samples have the score "
                f"{float(shaped[0]):g}: set reward.normalize=true, or a larger reward.clip"
            )
        length = float(float64(self.lengths).mean())
        clipped = fitted.clipped(self.scores.tolist())
        return ReferenceScores(shaped.tolist(), self.groups, length, clipped), fitted


def sample_prompts(prompts: int, samples: int, seed: int, number: int = 0) -> list[int]:
    """Prompt numbers for `samples` reference samples of plan `number`, drawn without repetition as far as they reach.

    8 samples for a prompt and at least 60 prompts, with few samples 2 for a prompt. If there are too few prompts for
    that, each gets more samples, so that the total is always `samples`.
    """
    count = max(1, min(prompts, max(samples // PER_PROMPT, min(LEAST_PROMPTS, samples // 2))))
    order = shuffled(prompts, seed, "reference prompts").tolist()
    chosen = [order[i % prompts] for i in range(number * count, (number + 1) * count)]
    each, more = divmod(samples, count)
    return [prompt for i, prompt in enumerate(chosen) for _ in range(each + (i < more))]


def sample_rounds(groups: Sequence[int]) -> list[list[int]]:
    """The samples of a plan (the prompt of each) in rounds, by number: each round has two or more of every prompt."""
    seen: Counter[int] = Counter()
    places = [(seen.update([group]), seen[group] - 1)[1] for group in groups]  # 0, 1, ... among those of a prompt
    count = max(1, min(len(groups) // ROUND, min(seen.values()) // 2))
    return [[i for i, place in enumerate(places) if place % count == number] for number in range(count)]


def reference_responses(
    sampler: Sampler,
    prompts: PromptStream,
    groups: Sequence[int],
    sampling: Sampling,
    tokenizer: Any,
    seed: int,
    samples: Sequence[int] | None = None,
    size: int | None = None,
    number: int = 0,
) -> Iterator[tuple[Responses, Sampled]]:
    """One response of the reference to the prompt of each of these `samples` (default: all) of plan `number`.

    `sampler`: of the reference. `size`: of a batch.
    """
    samples = range(len(groups)) if samples is None else samples
    size = size or prompts.batch_size
    noise = uniforms(len(groups), sampling.max_new_tokens, seed, "reference samples", *[number] * bool(number))
    for start in range(0, len(samples), size):
        rows = list(samples[start : start + size])
        yield sample(sampler, prompts.table.pick([groups[i] for i in rows]), noise[rows], sampling, tokenizer)


def score_samples(
    batches: Iterable[tuple[Responses, Sampled]], groups: list[int], scorers: Scorers | Score, shaping: ScoreShaping
) -> ReferenceSamples:
    """Score the reference's responses; responses without a score are left out.

    `shaping`: of the penalties. Errors: InputError from a reward, or for a score that is not finite.
    """
    scores, lengths, penalties, terms = [], [], [], []
    for responses, sampled in batches:
        values, texts = scorers(responses), responses.texts
        if bool((infinite := values[REWARD].isinf()).any()):
            raise InputError(f"reward: the score of {texts[int(infinite.nonzero()[0])][:60]!r} is not a finite number")
        scores.append(values[REWARD])
        terms.append({name.removeprefix(RAW): x for name, x in values.items() if name.startswith(RAW)})
        lengths.append(torch.tensor(list(map(len, responses.ids))))
        penalties.append(shaping.penalties(responses.ids, sampled.ended))
    raw = torch.cat(scores)
    known = ~raw.isnan()
    return ReferenceSamples(
        raw[known],
        torch.cat(lengths)[known],
        {name: torch.cat([each[name] for each in penalties])[known] for name in penalties[0]},
        [groups[i] for i in known.nonzero().flatten().tolist()],
        {name: torch.cat([each[name] for each in terms])[known] for name in terms[0]},
    )
