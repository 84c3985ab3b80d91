"""How often a run is evaluated, and on how much: with `auto` all that is not training takes a small share of its time.

Times are counted in tokens that a model reads in one forward pass, so the plan is the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.ppo.checks import CHECKED_ROWS, CHECKED_TOKENS
from rlhf_kl.ppo.heldout_samples import EACH, SHOWN
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.train.setup import Setup

SHARE = 0.15  # of a run's time for the start and all evaluations
# Passes for each token of prompt and response, measured on a CPU (0.3M to 135M parameters; the head included):
SAMPLED = 1.3
READ = 2.0  # by policy and reference
UPDATED = SAMPLED + 1.5  # without the epochs: the reference, and half of the responses after the update
EPOCH = 3.0  # forward and backward
EVERY = 10  # updates between two evaluations, if each has ENOUGH texts and responses
ENOUGH = 32
FEWEST = 8


@dataclass(frozen=True)
class EvalPlan:
    """The evaluations of a run."""

    every: int  # updates between two
    texts: int
    responses: int
    share: float  # of the run's time, with the start, as it was planned

    def words(self, updates: int) -> str:
        """One line for the start of a run."""
        moments = f"every {self.every} updates and at the end" if self.every < updates else "at the start and the end"
        return (
            f"evaluations {moments}, on {self.texts} texts and {self.responses} responses: with the start about "
            f"{self.share:.0%} of the run"
        )


def plan_evaluations(config: TrainConfig, setup: Setup, scores: ReferenceScores, before: EvalPlan | None) -> EvalPlan:
    """The plan for a config; what it leaves to `auto` stays as `before`, the plan of the run that goes on."""
    prompt = fmean(map(len, setup.prompts.table.ids))
    length = prompt + scores.length
    batch, updates, most = config.rollout.batch_size, config.updates, setup.heldout.batch_size
    written, documents = config.eval.every, config.eval.max_documents
    read = [0, *accumulate(map(len, encode_all(setup.tokenizer, setup.texts, bos=True)))]  # by the first n texts
    checked = (prompt + min(CHECKED_TOKENS, scores.length)) * min(CHECKED_ROWS, batch)
    start = SAMPLED * length * len(scores.shaped) + (SAMPLED + READ) * checked
    training = updates * batch * length * (UPDATED + EPOCH * config.ppo.epochs)
    room = SHARE / (1.0 - SHARE) * training - start

    def plan(every: int) -> EvalPlan:
        count = 1 + -(-updates // every)
        # The reference's are drawn once, and read each time; at the start they may be the policy's own.
        once = -READ if setup.reference_is_initial_policy else SAMPLED
        response = length * (SAMPLED + 2.0 * READ + once / count)
        more = response * (EACH - 1) * SHOWN  # for the texts that are shown
        each = room / count - more

        def responses(tokens: float) -> int:
            return min(most, max(FEWEST, int(tokens / response)))

        texts = len(setup.texts)
        if documents == "auto":
            left = each - response * responses(each / 2)
            texts = min(texts, max(FEWEST, bisect_right(read, left) - 1))
        drawn = responses(each - read[texts])
        spent = start + count * (read[texts] + drawn * response + more)
        return EvalPlan(every, texts, drawn, spent / (spent + training))

    if before is not None:
        texts = before.texts if documents == "auto" else len(setup.texts)
        return EvalPlan(before.every if written == "auto" else written, texts, before.responses, before.share)
    if written != "auto":
        return plan(written)
    every = EVERY
    while every < updates:
        planned = plan(every)
        if planned.responses >= min(ENOUGH, most) and planned.texts >= min(ENOUGH, len(setup.texts)):
            return planned
        every *= 2
    return plan(max(every, updates))
