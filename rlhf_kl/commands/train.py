"""`rlhf-kl train`: config -> parts -> the PPO loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf_kl.commands.guards import RunGuards
from rlhf_kl.commands.parts import EVAL_PROMPTS, Parts, build_parts, build_value, feature_rewards
from rlhf_kl.commands.reference_scores import ReferenceScores
from rlhf_kl.commands.samples import sample_rows, top_tokens
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.config.plugins import controller_arguments, controller_class
from rlhf_kl.config.schema import PPOSection, TrainConfig
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.evaluate import perplexity, policy_figures
from rlhf_kl.kl_controllers import KLControl
from rlhf_kl.kl_controllers.tilt import gain_at_kl
from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.models.fingerprint import model_fingerprint, texts_fingerprint
from rlhf_kl.models.load import parameter_count, save_model
from rlhf_kl.models.lora import checkpointed
from rlhf_kl.report.control import end, is_update
from rlhf_kl.reward_functions import (
    ResponseTraits,
    RewardModel,
    ScoreShaping,
    checked_scores,
    gold_scores_of,
    response_traits,
)
from rlhf_kl.rollout.collect import draw, measure, response_texts
from rlhf_kl.run.alerts import KLAlerts
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.exploitation import ExploitationSigns
from rlhf_kl.run.folders import write_folder
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.run.signals import stopping_on_signals
from rlhf_kl.seeding import library_state_kept, shuffled, uniforms
from rlhf_kl.trainers.checks import LOG_RATIO_LIMIT, check_start
from rlhf_kl.trainers.optim import adamw
from rlhf_kl.trainers.ppo import PPOTrainer, Update
from rlhf_kl.types import PromptBatch

PER_PROMPT = 32  # reference responses to one prompt: the spread that a policy can use is within prompts
SAMPLING_ROWS = 256


def run_train(config: TrainConfig, folder: RunFolder, display: TrainingDisplay) -> dict[str, Any]:
    """Train a policy; returns the summary."""
    accelerator = make_accelerator(config.run)
    parts = build_parts(config, accelerator, display)
    recorder = Recorder(folder, config, "train", display, accelerator.device, fingerprints(parts))
    try:
        return TrainRun(config, parts, recorder, accelerator, display).run()
    except InputError:
        recorder.mention_checkpoint()
        raise
    finally:
        recorder.close()


def fingerprints(parts: Parts) -> dict[str, str]:
    """What a resumed run must find unchanged, by config key."""
    found = {
        "reference.model": model_fingerprint(parts.reference),
        "data.prompts": texts_fingerprint(parts.prompts.texts),
    }
    if isinstance(parts.reward, RewardModel):
        found["reward.model"] = model_fingerprint(parts.reward.model)
    return found


def build_control(config: TrainConfig, coef: float) -> KLControl:
    """The controller of the config; `coef` is what `auto` came to."""
    found = controller_class(config.kl.controller.kind)
    try:
        return KLControl(found(**controller_arguments(found, config.kl, config.ppo, config.rollout, coef)))
    except (ValueError, TypeError) as error:
        raise InputError(f"kl.controller: {error}") from error


class ReferenceSamples(NamedTuple):
    """Responses of the reference to a batch of prompts, and what the reward says of them."""

    prompts: PromptBatch
    noise: Tensor  # (B, max_new_tokens) that they were drawn with
    responses: list[str]
    scores: Tensor  # (B,) raw
    traits: ResponseTraits


def reference_samples(
    config: TrainConfig, parts: Parts, accelerator: Any, indices: Sequence[int]
) -> Iterator[ReferenceSamples]:
    """One response of the reference to each of these prompts, batch by batch."""
    width, device = parts.sampling.max_new_tokens, accelerator.device
    for start in range(0, len(indices), SAMPLING_ROWS):
        batch = parts.prompts.pick(indices[start : start + SAMPLING_ROWS])
        noise = uniforms(len(batch), width, config.run.seed, "reference samples", start)
        with accelerator.autocast():
            sampled = draw(parts.reference, batch, noise, parts.sampling, device)
        responses = response_texts(parts.tokenizer, sampled)
        scores = checked_scores(parts.reward, batch.texts, responses, config.reward.kind)
        traits = response_traits(sampled.ids, sampled.mask, sampled.ended)
        yield ReferenceSamples(batch, noise, responses, scores, traits)


class TrainRun:
    """One run from its first sample to its summary."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        recorder: Recorder,
        accelerator: Any,
        display: TrainingDisplay,
    ) -> None:
        self.config, self.parts, self.recorder = config, parts, recorder
        self.accelerator, self.display = accelerator, display
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: dict[str, Any] | None = None
        checkpoint = recorder.checkpoint
        if checkpoint is None:
            self.reference_scores, shaping = self.score_reference()
            coef, note = self.starting_coef()
            if note:
                display.message(note)
        else:
            state = recorder.state
            self.reference_scores = ReferenceScores(**state["reference_scores"])
            shaping, coef = ScoreShaping(**state["trainer"]["shaping"]), state["starting_coef"]
        self.coef = coef
        scores = self.reference_scores
        model = build_value(config, parts, shaping, scores.mean, scores.spread).to(accelerator.device)
        optimizer = adamw(
            model,
            config.ppo.learning_rate,
            config.ppo.weight_decay,
            model.critic,
            config.ppo.critic_learning_rate,
        )
        control = build_control(config, coef)
        adjusts = getattr(control.controller, "adjusts", True)
        self.alerts = KLAlerts(
            None if coef == 0 else config.kl.target_value,
            unit=config.kl.unit,
            kind=config.kl.controller.kind,
            total_updates=config.updates,
            # A constant beta may lie on a bound by design.
            min_coef=control.min_coef if adjusts else None,
            max_coef=control.max_coef if adjusts else None,
        )
        self.signs = ExploitationSigns()
        self.trainer = PPOTrainer(
            config,
            accelerator,
            model,
            optimizer,
            parts.reference,
            parts.reward,
            shaping,
            control,
            parts.prompts,
            parts.tokenizer,
            parts.sampling,
            parts.gold,
            feature_rewards(parts),
        )
        self.guards = RunGuards(config, self.trainer, recorder.folder, parts.same_start)
        self.start = 1
        if checkpoint is not None:
            checkpoint.load_model(checkpointed(self.trainer.core))
            checkpoint.load_optimizer(optimizer)
            self.trainer.load_state_dict(state["trainer"])
            self.alerts.load_state_dict(state["alerts"])
            self.best, self.best_checkpoint = state["best"], state["best_checkpoint"]
            self.start = checkpoint.step + 1
            for row in read_jsonl(recorder.folder.metrics):
                if row.get("step", self.start) < self.start:
                    self.signs(row)
            display.message(f"going on from update {checkpoint.step}")

    # ------------------------------------------------------------------ before the first update

    def score_reference(self) -> tuple[ReferenceScores, ScoreShaping]:
        """Sample the reference, check the start, and fit the score's scale."""
        config, parts = self.config, self.parts
        count = config.rollout.reference_samples
        each = min(PER_PROMPT, count)
        chosen = shuffled(len(parts.prompts), config.run.seed, "reference prompts")[: max(1, count // each)].tolist()
        indices = [i for i in chosen for _ in range(each)]
        scores, golds, traits = [], [], []
        with self.display.progress("sampling the reference", len(indices)) as advance:
            for found in reference_samples(config, parts, self.accelerator, indices):
                scores.append(found.scores)
                golds += gold_scores_of(parts.gold, found.prompts.texts, found.responses) or []
                traits.append(found.traits)
                if len(scores) == 1:
                    self.check_start(found.prompts, found.noise)
                advance(len(found.prompts))
        raw = torch.cat(scores)
        section = config.reward
        unscaled = ScoreShaping(
            clip=section.clip,
            missing_eos_penalty=section.missing_eos_penalty,
            length_penalty=section.length_penalty,
            repetition_penalty=section.repetition_penalty,
        )
        shaping = unscaled.fit(raw, normalize=section.normalize)
        together = ResponseTraits(*(torch.cat(column) for column in zip(*traits, strict=True)))
        shaped: Tensor = shaping(raw, together)
        if section.clip is not None and bool(shaped.max() == shaped.min()):
            raise InputError(
                f"reward: cut off at {section.clip:g}, every one of {len(shaped)} reference samples scores "
                f"{float(shaped[0]):g}: set reward.normalize, or a wider reward.clip"
            )
        length = float(together.lengths.double().mean())
        return ReferenceScores(shaped.tolist(), indices, length, golds or None), shaping

    def check_start(self, batch: PromptBatch, noise: Tensor) -> None:
        """The fatal checks, on samples of the starting policy."""
        rows = min(len(batch), 64)
        few = PromptBatch(batch.texts[:rows], batch.ids[:rows], batch.mask[:rows])
        parts, temperature = self.parts, self.parts.sampling.temperature
        model = ActorCritic(parts.policy).to(self.accelerator.device)
        with self.accelerator.autocast():
            sampled = draw(parts.policy, few, noise[:rows], parts.sampling, self.accelerator.device)
            measured = measure(model, parts.reference, few, sampled, temperature)
            found = check_start(
                model,
                parts.reference,
                few,
                sampled,
                measured,
                temperature=temperature,
                same_start=parts.same_start,
                float32=self.config.run.dtype == "float32",
            )
        self.display.message("start checked: " + ", ".join(found))

    def starting_coef(self) -> tuple[float, str]:
        """The config's starting beta, or the one at which tilted reference samples have the target's KL."""
        written = self.config.kl.controller.coef
        if not isinstance(written, str):
            return written, ""
        return self.reference_scores.solve(self.sequence_target())

    def sequence_target(self) -> float:
        """The target in nats per response."""
        kl = self.config.kl
        return kl.target_value * (self.reference_scores.length if kl.unit == "token" else 1.0)

    def announce(self) -> None:
        """The table of counts, and everything about this run that one should know before it starts."""
        config, control = self.config, self.trainer.controller
        self.display.counts_table(
            {
                "policy parameters": parameter_count(self.trainer.core.policy),
                "prompts": len(self.parts.prompts),
                "rollout batch": config.rollout.batch_size,
                "minibatch": config.ppo.minibatch_size,
                "microbatch": config.ppo.microbatch_size or "automatic",
                "epochs": config.ppo.epochs,
                "updates": config.updates,
                "episodes": config.updates * config.rollout.batch_size,
            }
        )
        low, high = control.reach(config.updates, config.rollout.batch_size)
        kl = config.kl
        self.display.message(
            f"KL target {kl.target_value:g} nats per {kl.unit}"
            + (f", ceiling {kl.ceiling_value:g}" if kl.ceiling_value is not None else ", no ceiling")
            + f"; {kl.controller.kind} controller: beta starts at {control.coef:.4g}"
            + (f" and can move between {low:.3g} and {high:.3g}" if low != high else " and stays")
        )
        for warning in [
            *control.start_warnings(config.updates, config.rollout.batch_size),
            *gradient_notes(config),
            *unused_notes(config),
        ]:
            self.display.alert(warning)

    # ------------------------------------------------------------------ the loop

    def run(self) -> dict[str, Any]:
        """All updates, then the closing evaluation, `final/` and the summary."""
        config, total = self.config, self.config.updates
        self.recorder.begin()
        self.announce()
        with stopping_on_signals(config.checkpoint.grace) as stop, self.display:
            mark, due = time.perf_counter(), False
            for step in range(self.start, total + 1):
                evaluated = self.evaluate() if (step - 1) % config.eval.every == 0 else {}
                update = self.trainer.update(step)
                row = update.row
                row |= evaluated
                if step <= config.ppo.value_warmup + 1:
                    self.check_first(row)
                row["alerts"] = [*row["alerts"], *self.alerts(row), *self.signs(row)]
                ended_by = self.guards.watch(update)
                self.note_best(row)
                self.note_best_checkpoint(row)
                if step % config.tracking.samples_every == 0 or step in (1, total):
                    self.record_samples(step, update)
                self.measure_speed(row, time.perf_counter() - mark)
                mark = time.perf_counter()
                self.recorder.row(row)
                self.display.update(row)
                for alert in row["alerts"]:
                    self.display.alert(f"update {step}: {alert}")
                due = due or step % config.checkpoint.every == 0 or step == total
                if (due or stop.signal or ended_by) and update.skipped is None and not update.weights_lost:
                    self.save(step)
                    due = False
                if ended_by:
                    self.stop(row, ended_by)
                stop.check()
        return self.finish()

    def evaluate(self) -> dict[str, Any]:
        """Held-out perplexity, and the scores on held-out prompts."""
        parts, config = self.parts, self.config
        noise = uniforms(EVAL_PROMPTS, parts.sampling.max_new_tokens, config.run.seed, "evaluation")
        batch = parts.heldout.batch(1)
        with self.accelerator.autocast(), library_state_kept():
            text = perplexity(self.trainer.core.policy, parts.tokenizer, parts.texts)
            figures = policy_figures(
                self.trainer.core,
                parts.reference,
                batch,
                noise[: len(batch)],
                parts.sampling,
                parts.tokenizer,
                parts.reward,
                parts.gold,
            )
        return {
            "eval/perplexity": text.perplexity,
            "eval/bits_per_byte": text.bits_per_byte,
            "eval/scores": figures.scores,
            "eval/gold": figures.gold,
            "eval/kl_token": figures.kl_token,
            "eval/distinct_2": figures.distinct_2,
        }

    def check_first(self, row: dict[str, Any]) -> None:
        """The last fatal check: before its first step the policy must agree with its own rollout.

        Updates that ask the policy nothing, as those of a critic's warm-up, say nothing of it either: NaN.
        """
        if self.config.run.dtype == "float32" and row["policy/logratio_first_max"] > LOG_RATIO_LIMIT:
            raise GuardStop(
                f"step {row['step'] - 1}: before the policy's first optimizer step a log-prob differs by "
                f"{row['policy/logratio_first_max']:.3g} from the rollout's own"
            )

    def note_best(self, row: dict[str, Any]) -> None:
        """Remember the update with the highest score less its KL penalty."""
        reward = row["objective/rlhf_reward"]
        if math.isfinite(reward) and (self.best is None or reward > self.best["objective/rlhf_reward"]):
            keys = (
                "step",
                "objective/rlhf_reward",
                "objective/scores",
                "objective/gold",
                "kl/token",
                "kl/sequence",
            )
            self.best = {key: row[key] for key in keys}

    def note_best_checkpoint(self, row: dict[str, Any]) -> None:
        """Remember the checkpoint that `checkpoint.best` likes most: row k measured that of update k - 1."""
        metric, step = self.config.checkpoint.best, row["step"] - 1
        value = None if metric is None else row.get(metric)
        if value is None or not math.isfinite(value):
            return
        sign = -1.0 if metric == "eval/perplexity" else 1.0
        if self.best_checkpoint is not None and not sign * value > sign * self.best_checkpoint["value"]:
            return
        if any(checkpoint.step == step for checkpoint in checkpoints(self.recorder.folder.checkpoints)):
            self.best_checkpoint = {"step": step, "metric": metric, "value": value}

    def record_samples(self, step: int, update: Update) -> None:
        """A few responses of the update token by token, and where the whole batch diverges most."""
        for row in sample_rows(step, update, self.parts.tokenizer):
            self.recorder.sample(row)
        update.row["kl/top_tokens"] = top_tokens(update, self.parts.tokenizer)

    def measure_speed(self, row: dict[str, Any], seconds: float) -> None:
        """Rates over the whole step by the wall clock: evaluation, logging and checkpoints included."""
        samples = self.config.rollout.batch_size
        row["time/step_s"] = seconds
        row["perf/samples_per_s"] = samples / seconds
        row["perf/tokens_per_s"] = samples * row["rollout/response_length"] / seconds
        row["perf/peak_memory_mb"] = peak_memory_mb(self.accelerator.device)

    def stop(self, row: dict[str, Any], reason: str) -> NoReturn:
        """A guard's end: the summary says why, and what was whole last stays."""
        self.recorder.summary(steps=row["step"], episodes=row["episodes"], final=row, stopped_by=reason)
        raise GuardStop(reason)

    def save(self, step: int) -> None:
        """A checkpoint of everything that a resumed run needs."""
        state = {
            "trainer": self.trainer.state_dict(),
            "alerts": self.alerts.state_dict(),
            "best": self.best,
            "best_checkpoint": self.best_checkpoint,
            "starting_coef": self.coef,
            "reference_scores": vars(self.reference_scores),
        }
        spared = [self.best_checkpoint["step"]] if self.best_checkpoint else []
        self.recorder.save(step, checkpointed(self.trainer.core), self.trainer.optimizer, state, spared)

    # ------------------------------------------------------------------ the end

    def finish(self) -> dict[str, Any]:
        """Evaluate once more, write `final/` and the summary."""
        # From the file and not from memory: a resumed run has not seen all of them.
        rows = [row for row in read_jsonl(self.recorder.folder.metrics) if is_update(row)]
        tail = [row for row in end(rows) if None not in (row["kl/sequence"], row["objective/scores_shaped"])]
        evaluated = self.evaluate()
        step = self.config.updates
        # The policy after the last update is the one that would sample the next row.
        row = {"step": step + 1, "episodes": step * self.config.rollout.batch_size, **evaluated}
        self.recorder.row(row)
        self.note_best_checkpoint(row)
        self.write_final()
        last = rows[-1] if rows else {}
        return self.recorder.summary(
            steps=step,
            episodes=step * self.config.rollout.batch_size,
            final=last | evaluated,
            best=self.best,
            best_checkpoint=self.best_checkpoint,
            tilt_share=self.tilt_share(tail),
            reference=self.reference_scores.summary(),
            starting_coef=self.coef,
            stopped_by=None,
        )

    def tilt_share(self, tail: Sequence[dict[str, Any]]) -> float | None:
        """Score gain over that of the tilted reference samples at the same sequence KL; None where unknown.

        The tilt is the best that any policy can do at that KL, so 1 is the limit.
        """
        if not tail:
            return None
        gain = sum(row["objective/scores_shaped"] for row in tail) / len(tail) - self.reference_scores.mean
        kl = sum(row["kl/sequence"] for row in tail) / len(tail)
        limit = gain_at_kl(self.reference_scores.centred, kl, min_ess=self.reference_scores.min_ess)
        return gain / limit if limit else None

    def write_final(self) -> None:
        """`final/`: a folder that plain transformers loads; the value function in a file of its own."""
        core = self.trainer.core
        policy = core.policy
        policy.generation_config.eos_token_id = self.parts.sampling.eos_ids
        policy.generation_config.pad_token_id = self.parts.sampling.pad_id

        def write(place: Path) -> None:
            save_model(policy, self.parts.tokenizer, place)
            parts = {"value_head": core.value_head, "value_trunk": core.value_trunk, "critic": core.critic}
            tensors = {
                f"{name}.{key}": tensor.clone().contiguous()
                for name, part in parts.items()
                if part is not None
                for key, tensor in part.state_dict().items()
            }
            save_file(tensors, place / "value.safetensors")

        write_folder(self.recorder.folder.final, write)


def gradient_notes(config: TrainConfig) -> list[str]:
    """Choices that work but whose gradient is not that of KL(policy || reference), said once."""
    kl = config.kl
    if config.kl.controller.coef == 0:
        return []
    notes = []
    if kl.estimator == "importance":
        notes.append("kl.estimator importance: averaged over the policy's own samples it overstates the KL")
    if kl.estimator == "abs":
        notes.append("kl.estimator abs: its gradient is that of no KL")
    if kl.placement == "reward" and kl.estimator == "exact":
        notes.append(
            "kl.estimator exact in the reward: the current token's own KL is only a baseline there; "
            "rao_blackwell has the true gradient"
        )
    if kl.placement == "reward" and kl.estimator in ("k2", "k3"):
        notes.append(f"kl.estimator {kl.estimator} in the reward: not the gradient of KL(policy || reference); k1 is")
    if kl.placement == "loss" and kl.estimator == "k1":
        notes.append("kl.estimator k1 in the loss: its expected gradient is zero, so nothing holds the policy")
    if kl.placement == "loss" and kl.estimator == "k3":
        notes.append("kl.estimator k3 in the loss: has the gradient of KL(reference || policy), the other direction")
    return [f"kl-gradient: {note}" for note in notes]


def unused_notes(config: TrainConfig) -> list[str]:
    """Settings of a kind of value function that the run does not have, said once."""
    features = config.policy.value == "features"
    names = ("vf_coef", "cliprange_value") if features else ("critic_epochs", "critic_learning_rate")
    defaults = PPOSection()
    return [
        f"ppo.{name} is not used: policy.value is {config.policy.value}"
        for name in names
        if getattr(config.ppo, name) != getattr(defaults, name)
    ]


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MiB: of the GPU's allocator, else of this process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
