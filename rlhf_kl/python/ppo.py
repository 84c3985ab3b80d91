"""`rlhf_kl.PPO`: the updates of `rlhf-kl train`, in a loop of the caller's."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_kl import ui
from rlhf_kl.clock import Clock, speed
from rlhf_kl.config.schema.reward import EACH
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.events import worded
from rlhf_kl.models.lora import checkpointed, has_adapter
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.monitors import Monitors
from rlhf_kl.plugins import GIVEN
from rlhf_kl.ppo.reference import ReferenceSamples, score_samples
from rlhf_kl.ppo.rollout import Rollouts, sample_rollout, sampler_of
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.python.configured import ConfigLike, Reward, given_in_python, listed, python_config
from rlhf_kl.seeding import library_state, load_library_state
from rlhf_kl.training import sets
from rlhf_kl.training.card import model_card
from rlhf_kl.training.device import run_device
from rlhf_kl.training.final import write_final
from rlhf_kl.training.resolved import decided_chat, resolve, with_chat
from rlhf_kl.training.setup import build_setup, start_engine, streams, usable_prompts
from rlhf_kl.training.start import Training, check_sizes, configured_shaping, prepare_training
from rlhf_kl.training.updates import update_policy
from rlhf_kl.types import REWARD, Prompts, Responses, RolloutBatch, Sampled
from rlhf_kl.ui import log

NO_SCORER = f"{GIVEN}scores"  # the reward of a config that names none
Scores = Sequence[float | None] | Tensor


class PPO:
    """A policy, its reference and the trainer; the prompts and the scores of each update come from the caller.

        ppo = rlhf_kl.PPO("ppo_model.yaml", {"policy.model": "./my-model", "kl.target": 0.075}, updates=20)
        for prompts in batches:
            rollout = ppo.rollout(prompts)
            row = ppo.step(rollout, scores=judge(rollout.prompts, rollout.responses))
        ppo.save("final")

    The scale of the scores and the starting beta are measured once, before the first update: on samples of the
    reference by `scorer`, or by the config's reward if the first step has no scores; else on the first step's scores.
    """

    def __init__(
        self,
        config: ConfigLike = "ppo_adaptive.yaml",
        changes: Mapping[str, Any] | None = None,
        *,
        scorer: Reward | None = None,
        updates: int | None = None,
        seed: int | None = None,
        quiet: bool = False,
    ) -> None:
        """Load the models. config, changes: as for `rlhf_kl.train`; prompts, texts and reward may be left out.

        scorer: f(prompts, responses) -> one score a response. updates: of the whole loop, for the plan of the
        learning rate; default: `ppo.total_episodes` of the config. Errors: RlhfKlError.
        """
        ui.start(quiet)
        given = given_in_python(reward=scorer)
        settings = python_config(config, changes, given, needs_data=False, seed=seed, updates=updates)
        for key, name in (("data.prompts", settings.data.prompts), ("eval.texts", settings.eval.texts)):
            if name.startswith(GIVEN):
                given[key] = []
        self.knows_scorer = settings.reward.kind != NO_SCORER
        self.scorer_is_given = scorer is not None
        if not self.knows_scorer:
            given["reward.kind"] = _no_scores
        check_sizes(settings, 1)
        resolved = resolve(settings, given)
        self.setup = build_setup(resolved, run_device(settings.run))
        self.config = resolved.stored
        start_engine(self.config, self.setup)
        self.training: Training | None = None
        self.metrics: list[dict[str, Any]] = []  # the row of each update
        self.updates = 0  # that were made
        self.own_scale = False  # whether the scale is that of the caller's scores
        self._made: tuple[Responses, Sampled, RolloutBatch] | None = None
        self._began = time.perf_counter()

    @property
    def policy(self) -> Any:
        """The model of transformers (or peft) that is trained."""
        return self.setup.policy.module

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self.setup.tokenizer

    # ---- an update

    def rollout(self, prompts: Iterable[Any] | None = None) -> RolloutBatch:
        """Responses of the policy to these prompts, `rollout.samples_per_prompt` to each, beside its reference.

        prompts: `rollout.batch_size` / `samples_per_prompt` of them: texts, conversations, or rows (mappings) with
        columns for the scorer; None: those of the config. It has prompts and responses (texts), response_ids, mask,
        logprobs, ref_logprobs and exact_kl (B, T), nats. Errors: InputError for prompts that cannot be used.
        """
        self._require_updates()
        batch = None if prompts is None else self._prepared(listed("prompts", prompts))
        if batch is None and not len(self.setup.prompts):
            raise InputError("prompts: the config names none: ppo.rollout(prompts)")
        setup, step = self.setup, self.updates + 1
        rows = range(setup.prompts.batch_size)
        clock = self.training.clock if self.training else Clock()
        with clock.timed("time/rollout_s"), torch.no_grad():
            with sampler_of(setup.policy, setup.engine, Ranks()) as sampler:
                responses, sampled = sample_rollout(setup, sampler, step, rows, batch)
            made = self._rollouts.compare(responses, sampled)
        self._made = responses, sampled, made
        return made

    def step(self, rollout: RolloutBatch, scores: Scores | None = None) -> dict[str, Any]:
        """One update with the last rollout: PPO, then beta. Returns its row, as in `metrics.jsonl`.

        scores: one for each response, None = not scored; left out: by the scorer, or the config's reward.
        Errors: InputError for scores that do not fit; GuardStop where a run would end.
        """
        if self._made is None or self._made[2] is not rollout:
            raise InputError("rollout: step takes the rollout that was made last, once")
        responses, sampled, made = self._made
        raw = None if scores is None else {REWARD: _checked(scores, len(made))}
        if raw is not None and self.config.reward.normalize == EACH:
            raise InputError("scores: reward.normalize=each scales the terms of a sum, not its scores: leave them out")
        if raw is None and not self.knows_scorer:
            raise InputError("scores: no scorer is known: ppo.step(rollout, scores=...)")
        if raw is None and self.own_scale:
            raise InputError(
                "scores: their scale is that of the scores that the first step got: give them to each step"
            )
        step = self.updates + 1
        self.setup.scorers.begin(step, self.config.updates)
        if self.training is None:
            self.training = self._prepare(responses, sampled, raw)
            made = self._rollouts.compare(responses, sampled)  # with values, and the states of the trainer's own
        self._made = None
        training, scorers = self.training, self.setup.scorers
        with training.clock.timed("time/score_s"):
            batch = self._rollouts.with_scores(made, scorers(responses) if raw is None else raw)
        row, _, events = update_policy(self.config, training, scorers, Ranks(), step, batch)
        row["alerts"], decision = self._monitors(row, events)
        now = time.perf_counter()
        row |= speed(row, now - self._began, self.config.rollout.batch_size, self.setup.policy.device)
        self._began, self.updates = now, step
        self.metrics.append(row)
        for alert in row["alerts"]:
            log.warning(f"update {step}: {alert}")
        if decision is not None:
            raise GuardStop(decision.reason)
        return row

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the policy as plain transformers loads it, with its tokenizer and a card; returns the folder."""
        path, trainer = Path(folder), self._trained.trainer
        card = model_card(self.config, self.metrics, self.metrics[-1], adapter=has_adapter(self.policy))
        write_final(path, trainer.model, self.setup, card, keep=True)
        return path

    # ---- the state

    def state_dict(self) -> dict[str, Any]:
        """All that the next updates depend on, for `torch.save`. Errors: InputError before the first update."""
        training = self._trained
        return {
            "updates": self.updates,
            "own_scale": self.own_scale,
            "start": training.state_dict(),
            "trainer": training.trainer.state_dict(),
            "model": checkpointed(training.trainer.model.modules).state_dict(),
            "optimizer": training.trainer.optimizer.state_dict(),
            "scorers": self.setup.scorers.state_dict(),
            "libraries": library_state(),
            "monitors": self._monitors.state_dict(),
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of a `PPO` with the same config, bit for bit."""
        training = self.training = prepare_training(self.config, self.setup, saved=state["start"])
        self._begin(training)
        training.trainer.load_state_dict(state["trainer"])
        checkpointed(training.trainer.model.modules).load_state_dict(state["model"])
        training.trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # which may keep its tensors
        self.setup.scorers.load_state_dict(state["scorers"])
        self._monitors.load_state_dict(state["monitors"])
        load_library_state(state["libraries"])
        self.updates, self.metrics, self._made = state["updates"], list(state["metrics"]), None
        self.own_scale = state["own_scale"]

    # ---- the parts

    @property
    def _trained(self) -> Training:
        if self.training is None:
            raise InputError("no update was made yet: ppo.step comes first")
        return self.training

    @property
    def _rollouts(self) -> Rollouts:
        """Those of the trainer; before there is one, they have no values."""
        if self.training is not None:
            return self.training.trainer.rollouts
        setup = self.setup
        return Rollouts(
            setup, ActorCritic(setup.policy), ReferenceStates(setup.reference), configured_shaping(self.config)
        )

    def _prepare(self, responses: Responses, sampled: Sampled, raw: dict[str, Tensor] | None) -> Training:
        """The trainer, from samples of the reference, or from the scores of the first rollout."""
        samples: ReferenceSamples | None = None
        if raw is not None and not self.scorer_is_given:
            self.own_scale = True
            log.info("the scale of the scores and the starting beta come from the scores of the first rollout")
            groups = [i // self.setup.prompts.samples for i in range(len(responses.texts))]
            shaping = configured_shaping(self.config)
            samples = score_samples([(responses, sampled)], groups, lambda _: raw, shaping)
        training = prepare_training(self.config, self.setup, samples=samples)
        self._begin(training)
        return training

    def _begin(self, training: Training) -> None:
        control = training.trainer.controller
        self._monitors = Monitors(
            self.config,
            coef=training.coef,
            control=control,
            scores=training.reference_scores,
            learning_rate=training.trainer.rate.peak,
            from_reference=self.setup.reference_is_initial_policy,
        )
        for warning in worded(control.start_events(self.config.controlled_updates, self.config.rollout.batch_size)):
            log.warning(warning)

    def _prepared(self, prompts: list[Any]) -> Prompts:
        """One prompt for each response. The first ones are also those that the reference is sampled with."""
        stream, config = self.setup.prompts, self.config
        wanted = stream.batch_size // stream.samples
        if len(prompts) != wanted:
            raise InputError(
                f"prompts: an update takes {wanted} of them (rollout.batch_size / rollout.samples_per_prompt), and "
                f"{len(prompts)} came"
            )
        rows, left_out = sets.prompt_reader(config.data)(sets.given_rows(prompts, config.data.column) or [], "prompts")
        config = self.config = with_chat(config, decided_chat(config.data, rows, self.tokenizer))
        model, room = self.setup.policy.model, stream.longest
        table = usable_prompts("prompts", rows, model, self.tokenizer, room or None, config.data)
        if len(table) != len(prompts):
            raise InputError(
                f"prompts: {len(prompts) - len(table)} of {len(prompts)} cannot be used {left_out}".rstrip()
            )
        self.setup.scorers.trained.columns_of(table)
        if not len(stream):
            self.setup.prompts, self.setup.heldout = streams(config, table, table, longest=room)
        return table.pick([i // stream.samples for i in range(stream.batch_size)])

    def _require_updates(self) -> None:
        if self.updates >= self.config.updates:
            raise InputError(f"all {self.config.updates} updates were made: rlhf_kl.PPO(..., updates=N) plans more")


def _no_scores(prompts: Sequence[str], responses: Sequence[str]) -> list[None]:  # noqa: ARG001
    """Where scores come with each step."""
    return [None] * len(responses)


def _checked(scores: Scores, count: int) -> Tensor:
    """Scores (B,) float64; NaN where there is none. Errors: InputError for another number of them, or no numbers."""
    given: Any = scores
    column = getattr(given, "ndim", 1) == 2 and given.shape[-1] == 1
    values = list((given.squeeze(-1) if column else given).tolist() if hasattr(given, "tolist") else given)
    if len(values) != count:
        raise InputError(f"scores: {len(values)} for {count} responses")
    try:
        raw = torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"scores: not one number a response: {error}") from error
    if wrong := [i for i, value in enumerate(values) if value is not None and not math.isfinite(raw[i])]:
        raise InputError(f"scores: {raw[wrong[0]]:g} for response {wrong[0]}: give a number, or None for no score")
    return raw
