"""One rollout: samples responses, scores them, and compares policy and reference at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_kl.clock import Clock
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.distributed import Ranks
from rlhf_kl.events import UpdateSkipped
from rlhf_kl.memory import SMALLER_ROLLOUT, memory_for
from rlhf_kl.models.lm import LM
from rlhf_kl.models.tokens import decode_responses, pad
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.ops.head import token_kl, token_stats
from rlhf_kl.ops.logprobs import TokenStats
from rlhf_kl.ops.masked import all_finite
from rlhf_kl.ops.packing import Layout
from rlhf_kl.ppo.states import PASS_ROWS, PASS_TOKENS, ReferenceStates, StateFeatures
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.seeding import uniforms
from rlhf_kl.sharding import layer_by_layer, unsharded
from rlhf_kl.types import REWARD, Prompts, Responses, RolloutBatch, Sampled, Sampling, Score


class Sampler(Protocol):
    """A model, or an engine that has its weights."""

    def sample(self, prompts: Sequence[Sequence[int]], noise: Tensor, sampling: Sampling) -> Sampled:
        """See `LM.sample`."""


class Engine(Sampler, Protocol):
    """Draws responses in place of a model."""

    def fits(self, model: LM) -> bool:
        """Whether it can have the weights of a model."""

    def load(self, model: LM) -> None:
        """Take over the weights of a model as they are now; all processes call together. Errors: ServiceFailed."""


@contextmanager
def sampler_of(model: LM, engine: Engine | None, ranks: Ranks) -> Iterator[Sampler]:
    """What draws the responses of a model: the engine with its weights, or the model itself, whole in each process.

    All processes enter together. Errors: ServiceFailed, on all of them, for an engine that fails.
    """
    if engine is not None and engine.fits(model):
        ranks.run(partial(engine.load, model))
        yield engine
        return
    with unsharded(model):
        yield model


def sample(
    policy: Sampler, prompts: Prompts, noise: Tensor, sampling: Sampling, tokenizer: Any
) -> tuple[Responses, Sampled]:
    """One response to each prompt; `noise` (B, max_new_tokens) in [0, 1) decides the tokens."""
    sampled = policy.sample(prompts.ids, noise, sampling)
    return responses_of(prompts, sampled, sampling, tokenizer), sampled


def responses_of(prompts: Prompts, sampled: Sampled, sampling: Sampling, tokenizer: Any) -> Responses:
    """What was sampled, as scorers read it."""
    ids = sampled.rows()
    return Responses(prompts, decode_responses(tokenizer, ids, sampling.eos_ids), ids, tokenizer)


def rows_at_once(batch: int, prompts: Prompts, sampling: Sampling) -> int:
    """Responses that are drawn together beside the rollouts: a run's own `batch`, or more where all are short.

    A step of decoding for 16 rows takes half as long as one for 64; a batch may be small since its texts are long.
    """
    longest = max(map(len, prompts.ids)) + sampling.max_new_tokens
    return max(1, batch, min(PASS_ROWS, PASS_TOKENS["cpu"] // longest))


@dataclass(kw_only=True)
class RolloutParts:
    """What all rollouts of a run are made with, beside the models that they compare."""

    tokenizer: Any
    scorers: Score
    prompts: PromptStream
    sampling: Sampling
    together: Callable[[Sequence[Responses]], list[Responses]] = list  # as `Scorers.together`
    engine: Engine | None = None  # draws the responses, in place of the policy itself


class Rollouts:
    """Step -> the batch of all ranks: y ~ pi(.|x), then scores, log-probs under policy and reference, and values.

    Prompts and noise depend only on the seed and the step.
    """

    def __init__(
        self,
        parts: RolloutParts,
        model: ActorCritic,
        reference: ReferenceStates,
        shaping: ScoreShaping,
        features: StateFeatures | None = None,
        ranks: Ranks | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`features`: of the critic, if it has some."""
        self.parts, self.model, self.reference = parts, model, reference
        self.shaping, self.features = shaping, features
        self.ranks, self.clock = ranks or Ranks(), clock or Clock()

    def __call__(self, step: int) -> RolloutBatch:
        """The rollout of update `step` (from 1). Errors: InputError from a reward function."""
        ranks, timed = self.ranks, self.clock.timed
        with memory_for("a rollout does not fit", SMALLER_ROLLOUT):
            sampled = timed("time/rollout_s")(self.sample)(step)
            part = timed("time/score_s")(self.assess)(*sampled)
        # From here on there is one batch, the same in every process.
        rollout = RolloutBatch.concat(ranks.all(part))
        return replace(rollout, device=part.device, begin=ranks.mine(range(len(rollout))).start)

    def sample(self, step: int) -> tuple[Responses, Sampled]:
        """This rank's responses of update `step`."""
        rows = self.ranks.mine(range(self.parts.prompts.batch_size))
        with sampler_of(self.model.policy, self.parts.engine, self.ranks) as sampler:
            return self.ranks.run(lambda: sample_rollout(self.parts, sampler, step, rows))

    def assess(self, responses: Responses, sampled: Sampled) -> RolloutBatch:
        """Score this rank's responses, then compare policy and reference at their tokens."""
        (read,) = self.parts.together([responses])
        scores = self.ranks.run(lambda: self.parts.scorers(read), scores=True)
        return self.with_scores(self.compare(responses, sampled), scores)

    def with_scores(self, batch: RolloutBatch, scores: dict[str, Tensor]) -> RolloutBatch:
        """A batch with these raw scores, shaped for PPO; its critic reads the states that the scores were read from."""
        raw, values = scores[REWARD], batch.values
        shaped = torch.where(raw.isnan(), 0.0, self.shaping(raw, batch.penalties)).float()
        if self.features is not None:
            values = self.features.read(batch.layout, self.reference)
        return replace(batch, scores=scores, shaped_scores=shaped, values=values)

    def compare(self, responses: Responses, sampled: Sampled) -> RolloutBatch:
        """Policy and reference at the tokens of these responses, which have no scores yet, nor values from features."""
        prompts, device = responses.prompts, self.model.policy.device
        layout = response_layout(prompts.ids, sampled, device)
        prompt_ids, prompt_mask = pad(prompts.ids, 0, left=True)
        temperature = self.parts.sampling.temperature
        stats, values = measure(self.model, self.reference, layout, temperature, sampled.states)
        return RolloutBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            response_ids=sampled.ids,
            mask=sampled.mask,
            **stats._asdict(),
            values=values,
            drawn=sampled.logprobs,
            scores={},
            shaped_scores=torch.zeros(len(prompts)),
            ended=sampled.ended,
            prompts=prompts.texts,
            responses=responses.texts,
            rows=prompts.rows,
            penalties=self.shaping.penalties(responses.ids, sampled.ended),
            group=self.parts.prompts.samples,
            device=device,
        )


def sample_rollout(
    parts: RolloutParts, sampler: Sampler, step: int, rows: range, prompts: Prompts | None = None
) -> tuple[Responses, Sampled]:
    """The responses of these rows of update `step`, to the prompts of its batch or to those that are given."""
    stream, limit = parts.prompts, parts.sampling.max_new_tokens
    noise = uniforms(stream.batch_size, limit, stream.seed, "rollout", step)[rows.start : rows.stop]
    batch = stream.batch(step, rows.start, len(rows)) if prompts is None else prompts
    return sample(sampler, batch, noise, parts.sampling, parts.tokenizer)


def unusable(rollout: RolloutBatch) -> UpdateSkipped | None:
    """Why a rollout cannot be trained on; None if it can.

    One of its figures is not finite, or no response has a score.
    """
    figures = {
        "a log-prob of the policy": rollout.logprobs,
        "a log-prob of the reference": rollout.ref_logprobs,
        "a KL": rollout.exact_kl,
        "a value": rollout.values,
        "a score": (rollout.scores[REWARD] + rollout.shaped_scores)[rollout.scored],  # a clip makes inf finite
    }
    if not all_finite(figures.values()):
        name = next(name for name, x in figures.items() if not all_finite([x]))
        return UpdateSkipped(f"{name} was not finite")
    if not bool(rollout.scored.any()):
        return UpdateSkipped("the reward returned None for all responses", broken=False)
    return None


def response_layout(prompts: Sequence[Sequence[int]], sampled: Sampled, device: torch.device) -> Layout:
    """Positions of the tokens of prompts and responses, for passes on a device."""
    ids, mask = pad(prompts, 0, left=True)
    return Layout(torch.cat([ids, sampled.ids], 1), ids.shape[1], mask.sum(1), sampled.mask.sum(1), device)


@torch.no_grad()
def measure(
    model: ActorCritic,
    reference: ReferenceStates,
    layout: Layout,
    temperature: float,
    states: Tensor | None = None,
) -> tuple[TokenStats, Tensor]:
    """Policy and reference at the response tokens of a batch, and values (B, T), on the CPU; zeros in padding.

    Without a value function values are 0. The reference's states are kept for later. `states` (N, H): the policy's,
    if sampling has kept them; else they are computed.
    """
    reference.read(layout)
    figures = torch.zeros(len(TokenStats._fields) + 1, layout.tokens, device=layout.device)
    readers = [model.policy, *([] if model.value is None else [model.value])]
    with layer_by_layer(*readers, reference.lm):  # whose head reads its states: of a trained model it is sharded
        for rows in reference.passes(layout, None, *readers):
            hidden = model.policy(rows) if states is None else states.index_select(0, rows.numbers)
            ids, ref = layout.chosen[rows.places], reference.at(rows.numbers)
            read = [*token_stats(hidden, model.policy.head(), ids, ref, reference.head(), temperature)]
            if model.value is not None:
                read.append(model.value(rows, hidden))
            figures[: len(read), rows.numbers] = torch.stack(read)
    *stats, values = layout.grid(figures)
    return TokenStats(*stats), values


@torch.no_grad()
def exact_kl_now(
    policy: LM,
    reference: ReferenceStates,
    rollout: RolloutBatch,
    temperature: float,
    mine: Sequence[int] | None = None,
) -> Tensor:
    """Exact KL (B, T) of the current policy at the states of an earlier rollout, or of the rows `mine`, elsewhere 0."""
    kl = torch.zeros(rollout.mask.shape, device=rollout.device)
    layout = rollout.layout
    with layer_by_layer(policy):
        for rows in reference.passes(layout, mine, policy):
            chosen, ref = layout.chosen[rows.places], reference.at(rows.numbers)
            _, found = token_kl(policy(rows), policy.head(), chosen, ref, reference.head(), temperature)
            kl.view(-1)[rows.places] = found
    return kl
