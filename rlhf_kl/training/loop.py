"""`rlhf-kl train`: the PPO loop, with everything around an update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rlhf_kl import ui
from rlhf_kl.clock import speed
from rlhf_kl.config.named import NOTHING, Given
from rlhf_kl.config.resolve import gradient_notes, unused_notes
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import ServiceFailed
from rlhf_kl.events import Event, UpdateSkipped, WeightsLost, worded
from rlhf_kl.models.lora import checkpointed, has_adapter
from rlhf_kl.monitors import Decision, Monitors
from rlhf_kl.monitors.facts import StartEnd, closing_figures, control_figures, is_update, score_error
from rlhf_kl.run.checkpoint import Checkpoint
from rlhf_kl.run.folder import write_atomic
from rlhf_kl.run.log import encode_json, read_jsonl
from rlhf_kl.run.run import Run
from rlhf_kl.seeding import library_state, load_library_state
from rlhf_kl.text import counted, duration, format_number
from rlhf_kl.training.card import model_card
from rlhf_kl.training.device import run_device
from rlhf_kl.training.evaluation import evaluate_policy
from rlhf_kl.training.final import write_final
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.samples import sample_rows
from rlhf_kl.training.setup import Setup, build_setup, start_engine
from rlhf_kl.training.shards import shard_models
from rlhf_kl.training.start import Training, check_sizes, held_out, prepare_training
from rlhf_kl.training.updates import update_policy
from rlhf_kl.types import RolloutBatch
from rlhf_kl.ui import log

ROLLBACK_RAISE = 2.0  # of beta
LONG_S = 60.0  # between two checkpoints: so much that it is told


def run_train(config: TrainConfig, run: Run, given: Given = NOTHING) -> dict[str, Any]:
    """Train a policy; returns the summary. `given`: see `resolve`."""
    check_sizes(config, run.ranks.count)
    device = run_device(config.run, group=True)
    resolved = run.ranks.first_before_others(lambda: resolve(config, given))
    setup = run.ranks.first_before_others(lambda: build_setup(resolved, device))
    config = resolved.stored
    run.check(config, device, setup.fingerprints)
    shard_models(config, setup, device)
    start_engine(config, setup)
    training = prepare_training(config, setup, run.ranks, run.saved("start"))
    trainer = training.trainer
    model = checkpointed(trainer.model.modules)
    run.track(start=training, model=model, optimizer=trainer.optimizer, trainer=trainer, scorers=setup.scorers)
    return TrainLoop(config, setup, training, run).work()


class TrainLoop:
    """The loop of one run, with everything around an update: rows, alerts, evaluations."""

    def __init__(self, config: TrainConfig, setup: Setup, training: Training, run: Run) -> None:
        self.config, self.setup, self.training, self.run = config, setup, training, run
        self.trainer, self.ranks = training.trainer, run.ranks
        self.scorers = setup.scorers
        self.monitors = Monitors(
            config,
            coef=training.coef,
            control=self.trainer.controller,
            scores=training.reference_scores,
            learning_rate=self.trainer.rate.peak,
            from_reference=setup.reference_is_initial_policy,
        )
        run.track(monitors=self.monitors)

    # ---- the loop

    def work(self) -> dict[str, Any]:
        """All updates, then the closing evaluation, `final/` and the summary."""
        self.run.begin(self.config.updates)
        self.announce()
        kl = self.config.kl
        table = ui.RunTable(self.config.updates, kl.target_value, kl.unit)
        with ui.bar("update", self.config.updates, self.run.next_step - 1) as advance:
            self.update_all(lambda row: advance(1, table.show(row)))
            return self.finish()

    def update_all(self, show: Callable[[dict[str, Any]], None]) -> None:
        """The updates that are left; each row is shown."""
        config, total = self.config, self.config.updates
        began = time.perf_counter()
        self.spare()
        if 0 in self.run.spared and self.run.checkpoint is None:
            self.run.save(0)
        for step in self.run.steps():
            events: list[Event] = []
            self.scorers.begin(step, total)
            with self.going_on(step):
                evaluates = (step - 1) % config.eval.updates_between == 0
                # The policy before its first update is the reference, which is measured later: the row comes sooner.
                later = evaluates and step == 1 and self.setup.reference_is_initial_policy
                evaluated, samples = self.evaluate(step, events) if evaluates and not later else ({}, [])
                row, rollout, found = self.step(step)
                drawn = self.sample_rows(step, rollout)
                if later:
                    show(row | self.speed(row, began))
                    evaluated, samples = self.evaluate(step, events)
                    perplexity, score = (format_number(evaluated[f"eval/{name}"]) for name in ("perplexity", "scores"))
                    log.info(f"held out, before update 1: perplexity {perplexity}, score {score}")
            self.record(step, [*samples, *drawn])
            row |= evaluated
            row["alerts"], decision = self.monitors(row, events + found)
            ended_by = None if decision is None else self.obey(decision, row)
            self.note_best_checkpoint(row)
            row |= self.speed(row, began) | {"time/elapsed_s": self.run.seconds}
            began = time.perf_counter()
            # A policy with a broken number is no checkpoint.
            self.run.log(row, sound=not any(isinstance(event, UpdateSkipped | WeightsLost) for event in found))
            if not later:
                show(row)
            if step == self.run.next_step and (between := self.run.interval.seconds(row["time/step_s"])) >= LONG_S:
                log.info(f"a checkpoint about every {duration(between)}")
            for note in worded(found, notes=True):
                log.info(f"update {step}: {note}")
            for alert in row["alerts"]:
                log.warning(f"update {step}: {alert}")
            if ended_by:
                self.run.stop(row, ended_by, episodes=row["episodes"])

    @contextmanager
    def going_on(self, step: int) -> Iterator[None]:
        """The evaluation before update `step` and the update: where one fails, a checkpoint is left as of before them.

        Errors: ServiceFailed, with the way on.
        """
        states, libraries = self.scorers.state_dict(), library_state()
        try:
            yield
        except ServiceFailed as error:
            self.scorers.load_state_dict(states)  # a function may have scored before a server failed
            load_library_state(libraries)
            if self.run.next_step < step <= self.config.updates:  # else it is there, or nothing was done yet
                self.run.save_sound(step - 1)
            raise ServiceFailed(f"{error}; {self.run.way_on()}") from error

    def evaluate(self, step: int, events: list[Event]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The `eval/*` figures of the policy before update `step`, and samples; `events` gets what is left out."""
        held, at_end = self.training.heldout, step > self.config.updates
        more = held_out(self.config, self.setup, self.ranks, more=True) if at_end else None
        count = len(held.firsts) + (0 if more is None else len(more.firsts))
        same = self.setup.reference_is_initial_policy
        with ui.progress(f"evaluating on {len(held.texts)} texts and {count} responses"):
            figures, samples, parts = evaluate_policy(held, same, step, events, more)
        if self.ranks.writes:
            rows = (encode_json({"step": step} | asdict(part)) for part in parts)
            write_atomic(self.run.folder.tokens, b"".join(row + b"\n" for row in rows))
        return figures, samples

    def step(self, step: int) -> tuple[dict[str, Any], RolloutBatch, list[Event]]:
        """One update: its row, the rollout and its events. One that is not finite is left out."""
        self.scorers.begin(step, self.config.updates)  # discards what an evaluation logged
        return update_policy(self.config, self.training, self.scorers, self.ranks, step)

    def speed(self, row: Mapping[str, Any], began: float) -> dict[str, float]:
        """Times and rates of an update that began at `began`."""
        seconds = time.perf_counter() - began
        return speed(row, seconds, self.config.rollout.batch_size, self.setup.policy.device)

    # ---- what the monitors decide

    def obey(self, decision: Decision, row: dict[str, Any]) -> str | None:
        """Go back to a checkpoint, with an alert in the row; returns the reason if the run must end.

        For a KL above the ceiling: to the newest whose policy was below it, with beta doubled once more.
        """
        control, reason = self.trainer.controller, decision.reason
        if decision.action == "stop":
            return reason
        # Regular ones only: others would make a resumed run differ.
        good = [c for c in self.run.checkpoints() if self.run.interval.is_regular(c.step)]
        if ceiling := decision.name == "kl-above-ceiling":
            key, limit = f"kl/{self.config.kl.unit}", self.config.kl.ceiling_value or math.inf
            rows = [old for old in read_jsonl(self.run.folder.metrics) if old.get(key) is not None]
            below = {old["step"] - 1 for old in rows if old[key] < limit}  # row k + 1 measures checkpoint k
            good = [c for c in good if c.step in below]
        good = self.ranks.first(good)  # only its disk counts
        if not good:
            return f"{reason} in update {row['step']}, with no checkpoint to go back to"
        raised = control.raised
        self.go_back(good[-1])
        if ceiling and not control.raise_beta(ROLLBACK_RAISE * raised / control.raised):
            return f"{reason}, and beta {control.beta:.4g} cannot be raised"
        row["kl/coef_next"] = control.beta
        row["alerts"].append(self.monitors.rolled_back(decision, good[-1].step, control.beta))
        return None

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Restore everything that learns; the count of updates goes on."""
        adaptive = self.trainer.rate.adaptive
        factor = 1.0 if adaptive is None else adaptive.factor
        self.run.restore(checkpoint, ("model", "optimizer", "trainer", "scorers"))
        if adaptive is not None:  # a rate that was too high stays lower
            adaptive.factor = min(factor, adaptive.factor)

    def note_best_checkpoint(self, row: dict[str, Any]) -> None:
        """Remember the checkpoint that the row measures, if it is the best, regular or the last, and still there."""
        best = self.monitors.better_checkpoint(row)
        if best and not self.run.interval.is_regular(best["step"]) and best["step"] < self.config.updates:
            return
        if best and any(c.step == best["step"] for c in self.run.checkpoints()):
            self.monitors.best_checkpoint = best
            self.spare()

    def spare(self) -> None:
        """Keep the checkpoints that are needed beside the newest: the start for a rollback, and the best."""
        ceiling, best = self.config.kl.ceiling, self.monitors.best_checkpoint
        start = [0] if ceiling is not None and ceiling.action == "rollback" else []
        self.run.spared = start + ([best["step"]] if best is not None else [])

    def sample_rows(self, step: int, rollout: RolloutBatch) -> list[dict[str, Any]]:
        """Some responses of the update token by token, where they are due."""
        if step % self.config.tracking.samples_every and step not in (1, self.config.updates):
            return []
        logged = self.ranks.all(self.scorers.logged_columns(len(rollout) // self.ranks.count))
        names = [name for name in logged[0] if all(name in each for each in logged)]
        extra = {name: [value for each in logged for value in each[name]] for name in names}
        return list(sample_rows(step, rollout, self.setup.tokenizer, self.scorers.column_names, extra))

    def record(self, step: int, samples: Iterable[dict[str, Any]]) -> None:
        """Write rows of `samples.jsonl`."""
        for sample in samples:
            self.run.sample({"step": step} | sample)

    # ---- the beginning and the end

    def announce(self) -> None:
        """Show the KL target and the length of the run in a line, and its warnings, before it starts."""
        config, control, kl = self.config, self.trainer.controller, self.config.kl
        batch, first = config.rollout.batch_size, self.run.next_step == 1
        aim = f"KL target {kl.target_value:g} nats per {kl.unit}, beta {'starts at ' * first}{control.beta:.2g}"
        if not control.adjusts:
            low, high = control.beta_range(config.controlled_updates, batch)
            moves = f"stays at {control.beta:.2g}" if low == high else f"follows its schedule, {low:.2g} to {high:.2g}"
            aim = f"beta {moves}, whatever the KL"
        log.info(f"{'start checked; ' * first}{aim}; {counted(config.updates, 'update')} of {batch} responses")
        events = control.start_events(config.controlled_updates, batch)
        events += self.training.reference_scores.start_events()
        for warning in [*worded(events), *gradient_notes(config), *unused_notes(config)]:
            log.warning(warning)

    def finish(self) -> dict[str, Any]:
        """Evaluate once more, write `final/` and the summary."""
        # From the file: a resumed run has not seen all rows.
        rows = [row for row in read_jsonl(self.run.folder.metrics) if is_update(row)]
        step = self.config.updates
        self.scorers.begin(step + 1, self.config.updates)
        events: list[Event] = []
        with self.going_on(step + 1):
            evaluated, samples = self.evaluate(step + 1, events)
        self.record(step + 1, samples)
        for alert in worded(events):
            log.warning(alert)
        # The policy after the last update is the one that would sample the next row.
        row = {"step": step + 1, "episodes": step * self.config.rollout.batch_size, **evaluated}
        self.run.log(row)
        self.note_best_checkpoint(row | {"kl/error": rows[-1]["kl/error"] if rows else None})
        card = model_card(self.config, rows, row, adapter=has_adapter(self.setup.policy.module))
        with ui.progress("writing final/"):
            write_final(self.run.folder.final, self.trainer.model, self.setup, card, keep=self.ranks.writes)
        closing = closing_figures([*rows, row], self.config.kl.unit, self.config.eval.watched)
        return self.run.finish(
            steps=step,
            episodes=step * self.config.rollout.batch_size,
            final=(rows[-1] if rows else {}) | evaluated,
            best=self.monitors.best,
            best_checkpoint=self.monitors.best_checkpoint,
            control=control_figures(rows, self.config.kl, self.config.ppo.value_warmup),
            closing=closing,
            score_error=score_error(rows),
            tilt_share=self.tilt_share(closing, score_error(rows)),
            reference=self.training.reference_figures(),
            starting_coef=self.training.coef,
            learning_rate=self.trainer.rate.peak,
            stopped_by=None,
        )

    def tilt_share(self, closing: Mapping[str, StartEnd], error: float | None) -> float | None:
        """Score gain over that of the tilted reference samples at the same sequence KL; None where unknown.

        The tilt is the best that any policy can do at that KL, so 1 is the limit. A limit within two standard errors
        (`error`) of the score tells nothing.
        """
        scores = self.training.reference_scores
        kl, shaped = (closing.get(name, (None, None))[1] for name in ("kl_sequence", "scores_shaped"))
        limit = None if kl is None else scores.most_gain(kl)
        if limit is None or shaped is None or limit <= 2.0 * (error or 0.0):
            return None
        return (shaped - scores.mean) / limit
