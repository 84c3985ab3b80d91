"""Before the first update: the reference is sampled, the start checked, scores scaled and beta computed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_kl import ui
from rlhf_kl.clock import Clock
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.reward import EACH
from rlhf_kl.control import adjusts
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.advantages import ADVANTAGES
from rlhf_kl.ppo.checks import CHECKED_TOKENS, check_start, checked_prompts
from rlhf_kl.ppo.heldout import HeldOut
from rlhf_kl.ppo.reference import (
    PLANS,
    ReferenceSamples,
    ReferenceScores,
    SolvedCoef,
    reference_responses,
    sample_prompts,
    sample_rounds,
    score_samples,
)
from rlhf_kl.ppo.rollout import measure, response_layout, responses_of, rows_at_once, sampler_of
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.rewards.terms import term_figures
from rlhf_kl.seeding import library_state_kept, uniforms
from rlhf_kl.sharding import OLDEST_TORCH, can_shard
from rlhf_kl.shell import shell_command
from rlhf_kl.training.device import LAUNCH
from rlhf_kl.training.setup import Setup, trained_on
from rlhf_kl.training.trainer import build_trainer
from rlhf_kl.types import REWARD, Responses, Sampled
from rlhf_kl.ui import log

AT_END = 4  # times `eval.responses`: the responses that are scored at the end of a run
TRIED = 2  # responses, or all to one prompt
MANY_EMPTY = 0.5  # share of the reference's responses: then a run has hardly a signal


@dataclass
class Training:
    """A trainer, and the figures from before its first update."""

    trainer: PPOTrainer
    reference_scores: ReferenceScores
    shaping: ScoreShaping
    coef: float  # the starting beta
    heldout: HeldOut
    clock: Clock

    def state_dict(self) -> dict[str, Any]:
        """What `prepare_training` takes in place of a new measurement."""
        scores, shaping = vars(self.reference_scores), vars(self.shaping)
        return {"coef": self.coef, "reference_scores": scores, "shaping": shaping}

    def reference_figures(self) -> dict[str, Any]:
        """Those of the reference's samples for `summary.json`, with the scale that they gave the scores."""
        return self.reference_scores.summary() | {"scale": {"mean": self.shaping.mean, "std": self.shaping.std}}


def prepare_training(
    config: TrainConfig,
    setup: Setup,
    ranks: Ranks | None = None,
    saved: dict[str, Any] | None = None,
    samples: ReferenceSamples | None = None,
) -> Training:
    """The trainer of a run. `saved`: the figures from before its first update, as in `Training.state_dict`.

    `samples`: responses of the reference with their scores, where some are there already.
    Errors: GuardStop, InputError from the checks at the start.
    """
    ranks = ranks or Ranks()
    if saved is None:
        first = check_policy(config, setup, ranks)
        if samples is None:
            try_reward(config, setup, ranks, first)
            samples = score_reference(config, setup, ranks)
        scores, shaping = samples.shaped(configured_shaping(config), normalize=bool(config.reward.normalize))
        scores = replace(scores, terms=term_figures(samples.terms, setup.scorers.add_up(samples.terms)))
        coef, note, known = starting_coef(config, scores)
        if note and not known:  # else beta is a guess, which the controller mends
            log.info(note)
    else:
        scores = ReferenceScores(**saved["reference_scores"])
        shaping = ScoreShaping(**saved["shaping"])
        coef = saved["coef"]
        if config.reward.normalize == EACH:
            setup.scorers.scale(scores.terms)
    clock = Clock()
    trainer = build_trainer(config, setup, scores, shaping, coef, clock, ranks)
    solved = None
    with contextlib.suppress(InputError):
        solved = solved_coef(config, scores)
    if solved is not None and solved.known:
        trainer.controller.know_solved(solved.coef, solved.known)
    setup.scorers.state_dict()  # fails now, not at the first checkpoint
    return Training(trainer, scores, shaping, coef, held_out(config, setup, ranks), clock)


def held_out(config: TrainConfig, setup: Setup, ranks: Ranks, *, more: bool = False) -> HeldOut:
    """What the evaluations of a run measure; `more`: the further prompts that are scored at its end."""
    stream = setup.heldout
    return HeldOut(
        setup.policy,
        None if more else setup.reference,
        setup.tokenizer,
        setup.sampling,
        stream.batch(2, rows=(AT_END - 1) * stream.batch_size) if more else stream.batch(1),
        texts=() if more else setup.texts,
        scorers=setup.scorers,
        seed=config.run.seed,
        purpose="evaluation at the end" if more else "evaluation",
        batch=config.rollout.batch_size,
        several=not more,
        ranks=ranks,
        engine=setup.engine,
        trained_on=trained_on(setup.prompts.table, stream.table),
    )


def check_sizes(config: TrainConfig, processes: int) -> None:
    """Errors: InputError if the config's sizes, totals over all processes, cannot be divided among them."""
    rollout = config.rollout
    if config.reference_samples < processes:
        raise InputError(f"rollout.reference_samples: {config.reference_samples} are too few for {processes} processes")
    for section, shard in (("policy", config.policy.shard), ("reference", config.reference.shard)):
        if shard and processes == 1:
            raise InputError(f"{section}.shard: needs several processes: {LAUNCH}")
        if shard and not can_shard():
            needed = ".".join(map(str, OLDEST_TORCH))
            raise InputError(f"{section}.shard: torch {needed} or newer is needed")
    wanted = {
        "rollout.batch_size": (rollout.batch_size, processes * rollout.samples_per_prompt),
        "ppo.minibatch_size": (config.minibatch_size, processes * config.rows_together),
    }
    if problems := [
        f"{key}: {size} is not a multiple of {unit}: {processes} processes share it"
        + (f", {rollout.samples_per_prompt} responses a prompt" if unit > processes else "")
        for key, (size, unit) in wanted.items()
        if size % unit
    ]:
        raise InputError(*problems)


def configured_shaping(config: TrainConfig) -> ScoreShaping:
    """The shaping of scores, before its scale is fitted."""
    section = config.reward
    return ScoreShaping(
        clip=section.clip,
        missing_eos_penalty=section.missing_eos_penalty,
        length_penalty=section.length_penalty,
        repetition_penalty=section.repetition_penalty,
    )


def score_reference(config: TrainConfig, setup: Setup, ranks: Ranks) -> ReferenceSamples:
    """Sample the reference and score it; it scales the terms of a sum. Equal scores call for more samples.

    Errors: InputError from the reward.
    """
    shaping = configured_shaping(config)

    def are_enough(samples: ReferenceSamples) -> bool:
        with contextlib.suppress(InputError):  # which is raised below if more samples do not help
            scores, _ = samples.shaped(shaping, normalize=bool(config.reward.normalize))
            # A controller expects the beta that holds the target near the solved one, also if another start is written.
            solve = solved_coef if adjusts(config.kl.controller.kind) else starting_coef
            return scores.are_enough(lambda some: solve(config, some)[0])
        return False

    with ui.progress("sampling the reference", config.reference_samples // ranks.count) as advance:
        for samples, complete in sample_references(config, setup, shaping, ranks, advance):
            if complete and not len(samples.scores):
                raise InputError("reward: returned None for all reference samples")
            with contextlib.suppress(InputError):
                scaled = scale_terms(config, setup, samples)
                if scaled.spread and (complete or are_enough(scaled)):
                    break
    samples = scale_terms(config, setup, samples)
    empty = float((samples.lengths <= 1).float().mean())
    if empty > MANY_EMPTY:
        log.warning(f"{empty:.0%} of the reference's responses are empty: see `{shell_command()} doctor`")
    return samples


def scale_terms(config: TrainConfig, setup: Setup, samples: ReferenceSamples) -> ReferenceSamples:
    """With `reward.normalize: each`: the scorers on the scale of these samples, and the samples with such scores.

    Errors: InputError for a term without a scale.
    """
    if config.reward.normalize != EACH:
        return samples
    setup.scorers.fit(samples.terms)
    return replace(samples, scores=setup.scorers.add_up(samples.terms)[REWARD])


def sample_references(
    config: TrainConfig, setup: Setup, shaping: ScoreShaping, ranks: Ranks, advance: ui.Advance
) -> Iterator[tuple[ReferenceSamples, bool]]:
    """All samples so far after each round, and whether they are `rollout.reference_samples`, or a multiple of it."""
    drawn = list[ReferenceSamples]()
    size = rows_at_once(config.rollout.batch_size // ranks.count, setup.prompts.table, setup.sampling)
    seed = config.run.seed

    def sample(groups: list[int], mine: list[int], number: int) -> ReferenceSamples:
        def draw() -> Iterator[tuple[Responses, Sampled]]:
            options = setup.sampling, setup.tokenizer, seed, mine, size, number
            for responses, sampled in reference_responses(sampler, setup.prompts, groups, *options):
                yield responses, sampled._replace(states=None)
                advance(len(responses.texts))

        with sampler_of(setup.reference, setup.engine, ranks) as sampler:
            responses, sampled = zip(*ranks.run(lambda: list(draw())), strict=True)
        read = setup.together(responses)
        of_prompts = [groups[i] for i in mine]
        return ranks.run(
            lambda: score_samples(zip(read, sampled, strict=True), of_prompts, setup.scorers, shaping), scores=True
        )

    for number in range(PLANS):
        groups = sample_prompts(len(setup.prompts), config.reference_samples, seed, number)
        rounds = sample_rounds(groups)
        for rows in rounds:
            drawn += ranks.all(sample(groups, ranks.mine(rows), number))
            yield ReferenceSamples.concat(drawn), rows is rounds[-1]


def check_policy(config: TrainConfig, setup: Setup, ranks: Ranks) -> Responses:
    """The fatal checks, on samples of the starting policy; every process makes them on the same samples.

    Returns some more of these, to prompts of the run, for `try_reward`.
    """
    prompts = checked_prompts(setup.prompts)
    tried = setup.prompts.batch(1, rows=max(TRIED, config.rollout.samples_per_prompt))
    sampling = replace(setup.sampling, max_new_tokens=min(CHECKED_TOKENS, setup.sampling.max_new_tokens))
    parts = {"start": len(prompts), "reward tried": len(tried)}
    noise = [uniforms(count, sampling.max_new_tokens, config.run.seed, name) for name, count in parts.items()]
    with sampler_of(setup.policy, setup.engine, ranks) as sampler:
        drawn = ranks.run(lambda: sampler.sample([*prompts, *tried.ids], torch.cat(noise), sampling))
    sampled, more = (drawn.pick(rows) for rows in (slice(len(prompts)), slice(len(prompts), None)))
    layout = response_layout(prompts, sampled, setup.policy.device)
    plain = ReferenceStates(setup.reference, share=False, once=True)  # reads otherwise than the sampler, so errors show
    stats, _ = measure(ActorCritic(setup.policy), plain, layout, setup.sampling.temperature)
    check_start(
        setup.policy,
        setup.reference,
        sampled,
        stats,
        reference_is_initial_policy=setup.reference_is_initial_policy,
        dtype=config.run.dtype,
        engine=setup.engine is not None,
    )
    if not setup.reference_is_initial_policy:
        kl = float(stats.exact_kl[sampled.mask].mean())
        words = f"the policy begins with other weights than its reference, at about {kl:.3g} nats per token"
        far = config.kl.unit == "token" and adjusts(config.kl.controller.kind) and kl > config.kl.target_value
        advice = (
            ": to come down to the target it gives up what it has learned; reference.model=null keeps it near its start"
        )
        log.log(logging.WARNING if far else logging.INFO, words + advice * far)
    return responses_of(tried, more, sampling, setup.tokenizer)


def try_reward(config: TrainConfig, setup: Setup, ranks: Ranks, responses: Responses) -> None:
    """Score a few short responses of the starting policy: a reward that fails does so before many are drawn.

    It changes no state. Errors: InputError from the reward.
    """
    with library_state_kept(), setup.scorers.kept():
        (read,) = setup.together([responses])
        ranks.run(lambda: setup.scorers(read), scores=True)
    setup.scorers.begin(1, config.updates)  # clears what it logged


def starting_coef(config: TrainConfig, scores: ReferenceScores) -> SolvedCoef:
    """The starting beta: the config's, or the beta at which tilted reference samples have the target KL."""
    written = config.kl.controller.coef
    return solved_coef(config, scores) if isinstance(written, str) else SolvedCoef(written)


def solved_coef(config: TrainConfig, scores: ReferenceScores) -> SolvedCoef:
    """The beta at which tilted reference samples have the target KL.

    Errors: InputError as `ReferenceScores.solve`.
    """
    estimator = ADVANTAGES[config.ppo.advantage]
    budget = config.kl.target_value * (scores.length if config.kl.unit == "token" else 1.0)
    solved = scores.solve(budget, scaled=estimator.options(config.ppo).get("scale_by_group_std", False))
    return solved._replace(coef=solved.coef * estimator.weight(config.rollout.samples_per_prompt))
