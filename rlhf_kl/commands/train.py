"""`rlhf-kl train`: config -> parts -> the PPO loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlhf_kl import ui
from rlhf_kl.commands.build import Parts, build_parts
from rlhf_kl.commands.card import model_card
from rlhf_kl.commands.final import write_final
from rlhf_kl.commands.guards import RunGuards, StepResult
from rlhf_kl.commands.samples import sample_rows, top_tokens
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.training import Training, check_sizes, evaluate_policy, fingerprints, prepare_training
from rlhf_kl.commands.watches import kl_alerts, kl_bought
from rlhf_kl.config.notes import start_notes
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.models.load import parameter_count
from rlhf_kl.models.lora import checkpointed, has_adapter
from rlhf_kl.report.control import closing_figures, end, is_update, near_target, worth
from rlhf_kl.rewards.scorer import GOLD_FAILED, mean_metrics
from rlhf_kl.rollout.collect import UNSCORED, NonFiniteRollout
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.clock import speed
from rlhf_kl.run.collapse import EqualResponses
from rlhf_kl.run.exploitation import ExploitationSigns
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.run.signals import stopping_on_signals
from rlhf_kl.sharding import held_share, local
from rlhf_kl.status import RunStatus
from rlhf_kl.trainers.checks import check_first
from rlhf_kl.trainers.guards import all_finite
from rlhf_kl.trainers.metrics import failed_row, update_row
from rlhf_kl.ui import log


def run_train(config: TrainConfig, folder: RunFolder, ranks: Ranks) -> dict[str, Any]:
    """Train a policy; returns the summary."""
    check_sizes(config, ranks.count)
    accelerator = make_accelerator(config.run, group=True)
    parts = ranks.first_before_others(lambda: build_parts(config, accelerator))
    recorder = Recorder(folder, config, "train", accelerator.device, fingerprints(parts), ranks)
    try:
        training = prepare_training(config, parts, recorder.checkpoint, recorder.state or None, ranks)
        return TrainRun(config, parts, training, recorder).run()
    except InputError:
        recorder.mention_checkpoint()
        raise
    finally:
        recorder.close()


class TrainRun:
    """The loop of one run, with everything around an update: rows, alerts, guards, evaluations, checkpoints."""

    def __init__(self, config: TrainConfig, parts: Parts, training: Training, recorder: Recorder) -> None:
        self.config, self.parts, self.training = config, parts, training
        self.trainer, self.recorder = training.trainer, recorder
        self.ranks = recorder.processes
        self.status = RunStatus(config.updates, config.kl.target_value, config.kl.unit)
        self.constant_coef = None if self.trainer.controller.adjusts else training.coef
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: dict[str, Any] | None = None
        self.gold_failing = False  # in the previous row
        self.scorers = parts.scorers
        self.alerts = kl_alerts(config, training)
        self.bought = kl_bought(config, parts, training)
        self.signs = ExploitationSigns()
        self.equal = EqualResponses()
        self.guards = RunGuards(config, training, recorder.folder)
        if recorder.checkpoint is not None:
            self.alerts.load_state_dict(recorder.state["alerts"])
            self.guards.load_state_dict(recorder.state["guards"])
            self.best, self.best_checkpoint = recorder.state["best"], recorder.state["best_checkpoint"]
            self.gold_failing = recorder.state["gold_failing"]
            for row in read_jsonl(recorder.folder.metrics):
                if row.get("step", training.next_step) < training.next_step:
                    self.signs(row)
                    self.equal(row)
                    self.bought(row)
                    self.status.remember(row)

    # ---- the loop

    def run(self) -> dict[str, Any]:
        """All updates, then the closing evaluation, `final/` and the summary."""
        self.recorder.begin()
        self.announce()
        with ui.live(self.status):
            self.update_all()
            return self.finish()

    def update_all(self) -> None:
        """The updates that are left."""
        config, total = self.config, self.config.updates
        with stopping_on_signals(config.checkpoint.grace) as stop:
            began, due = time.perf_counter(), False
            if self.rolls_back and self.recorder.checkpoint is None:
                self.save(0)  # so that a rollback can go back to the start
            for step in range(self.training.next_step, total + 1):
                alerts: list[str] = []
                looks = (step - 1) % config.eval.every == 0
                self.scorers.begin(step, self.config.updates)
                evaluated = self.look(alerts.append) if looks else {}
                ui.show_work(f"update {step}")
                result = self.step(step)
                row = result.row
                row |= evaluated
                row["alerts"] = self.gold_told_once([*alerts, *row["alerts"]])
                equal, lines = self.equal(row)
                row["alerts"] += [*self.alerts(row), *self.bought(row), *self.signs(row), *equal]
                for line in lines:
                    log.info(f"update {step}: {line}")
                ended_by = self.guards.watch(result)
                self.note_best(row)
                self.note_best_checkpoint(row)
                if step % config.tracking.samples_every == 0 or step in (1, total):
                    self.record_samples(result)
                now = time.perf_counter()
                row |= speed(row, now - began, config.rollout.batch_size, self.parts.policy.device)
                began = now
                self.recorder.row(row)
                ui.show_row(row)
                for alert in row["alerts"]:
                    log.warning(f"update {step}: {alert}")
                due = due or step % config.checkpoint.every == 0 or step == total
                signalled = max(self.ranks.all(stop.signal or 0))
                if (due or signalled or ended_by) and result.skipped is None and not result.weights_lost:
                    self.save(step)
                    due = False
                if ended_by:
                    self.stop(row, ended_by)
                stop.check(max(self.ranks.all(stop.signal or 0)))

    def look(self, report: Callable[[str], None]) -> dict[str, Any]:
        """The `eval/*` figures of the policy as it is."""
        ui.show_work(f"evaluating on {len(self.parts.texts)} texts and {self.parts.heldout.batch_size} prompts")
        return evaluate_policy(self.config, self.parts, report, self.ranks)

    def step(self, step: int) -> StepResult:
        """One update and its row; a rollout that is not finite is reported and left out."""
        config, clock, trainer = self.config, self.training.clock, self.trainer
        alerts: list[str] = []
        self.scorers.begin(step, self.config.updates)  # discards what an evaluation logged
        try:
            update = clock.timed("time/update_s", trainer.update)(step)
        except NonFiniteRollout as failure:
            skipped: str | None = failure.figure
            rollout, row = failure.rollout, failed_row(failure, trainer.controller.coef, config)
        else:
            skipped, rollout, row = update.stats.skipped, update.rollout, update_row(update, config)
            alerts += update.alerts
        seconds = clock.read()
        seconds["time/update_s"] -= seconds["time/rollout_s"] + seconds["time/score_s"]
        weights_lost = not all(self.ranks.all(all_finite(map(local, trainer.trained))))
        if skipped is not None:
            why = (
                "is missing, so nothing was learned"
                if skipped == UNSCORED
                else "was not finite, so the steps that need it were left out"
            )
            alerts.append(f"update-skipped: {skipped} {why}")
        alerts += [f"{GOLD_FAILED}: {failure}: left out" for failure in rollout.failures[:1]]
        if weights_lost:
            alerts.append("weights-lost: a weight is not finite any more")
        row |= seconds | {
            "step": step,
            "episodes": step * config.rollout.batch_size,
            **mean_metrics(self.ranks.all(self.scorers.logged_metrics())),
            "kl/bought": self.bought.share(row),
            "dist/world_size": self.ranks.count,
            "dist/held": held_share(trainer.trained),
            "alerts": alerts,
        }
        row = self.ranks.first(row)  # times are those of the first process
        if step <= config.ppo.value_warmup + 1:
            check_first(row, float32=config.run.dtype == "float32")
        return StepResult(row, rollout, skipped, weights_lost)

    def gold_told_once(self, alerts: list[str]) -> list[str]:
        """The alerts of a row; a failing gold scorer is reported only when it begins to fail."""
        failures = [alert for alert in alerts if alert.startswith(GOLD_FAILED)]
        told = [] if self.gold_failing else failures[:1]
        self.gold_failing = bool(failures)
        return [*told, *(alert for alert in alerts if alert not in failures)]

    # ---- records and checkpoints

    def note_best(self, row: dict[str, Any]) -> None:
        """Remember the best update, by `worth`."""
        value = worth(row, self.constant_coef)
        if math.isfinite(value) and (self.best is None or value > worth(self.best, self.constant_coef)):
            keys = ("scores_shaped", "scores", "gold")
            kl = ("token", "sequence", "error")
            self.best = {"step": row["step"]} | {
                key: row[key] for key in (*(f"objective/{name}" for name in keys), *(f"kl/{name}" for name in kl))
            }

    def note_best_checkpoint(self, row: dict[str, Any]) -> None:
        """Remember the best checkpoint by `checkpoint.best`: row k measures the policy after update k - 1."""
        metric, step = self.config.checkpoint.best, row["step"] - 1
        value = None if metric is None else row.get(metric)
        if value is None or not math.isfinite(value) or (self.constant_coef is None and not near_target(row)):
            return
        sign = -1.0 if metric == "eval/perplexity" else 1.0
        if self.best_checkpoint is not None and not sign * value > sign * self.best_checkpoint["value"]:
            return
        if any(checkpoint.step == step for checkpoint in checkpoints(self.recorder.folder.checkpoints)):
            self.best_checkpoint = {"step": step, "metric": metric, "value": value}

    def record_samples(self, result: StepResult) -> None:
        """Record some responses of the update token by token, and the tokens of the batch with the largest KL."""
        logged = self.ranks.all(self.scorers.logged_columns(len(result.rollout) // self.ranks.count))
        names = [name for name in logged[0] if all(name in each for each in logged)]
        extra = {name: [value for each in logged for value in each[name]] for name in names}
        for row in sample_rows(result, self.parts.tokenizer, self.scorers.column_names, extra):
            self.recorder.sample(row)
        result.row["kl/top_tokens"] = top_tokens(result.rollout, self.parts.tokenizer)

    @property
    def rolls_back(self) -> bool:
        """Whether a KL above the ceiling rolls the run back."""
        return self.config.kl.ceiling is not None and self.config.kl.ceiling.action == "rollback"

    def save(self, step: int) -> None:
        """Write a checkpoint with everything that a resumed run needs."""
        own = self.training.state_dict()
        state = {
            **own,
            "other_scorers": self.ranks.all(own["scorers"])[1:],
            "alerts": self.alerts.state_dict(),
            "guards": self.guards.state_dict(),
            "best": self.best,
            "best_checkpoint": self.best_checkpoint,
            "spared": [0] * self.rolls_back + ([self.best_checkpoint["step"]] if self.best_checkpoint else []),
            "gold_failing": self.gold_failing,
        }
        trainer = self.trainer
        self.recorder.save(step, checkpointed(trainer.model.modules), trainer.optimizer, state)

    # ---- the beginning and the end

    def announce(self) -> None:
        """Show the sizes of the run, its KL target and its warnings, before it starts."""
        config, control = self.config, self.trainer.controller
        updates, batch, kl = config.updates, config.rollout.batch_size, config.kl
        ui.print_counts(
            {
                "policy parameters": parameter_count(self.parts.policy.module),
                "prompts": len(self.parts.prompts),
                "rollout batch": batch,
                "minibatch": config.minibatch_size,
                "microbatch": config.ppo.microbatch_size or "automatic",
                "epochs": config.ppo.epochs,
                "learning rate": f"{self.trainer.rate.peak:.3g}",
                "updates": updates,
                "episodes": updates * batch,
            }
        )
        low, high = control.reach(config.controlled_updates, batch)
        log.info(
            f"KL target {kl.target_value:g} nats per {kl.unit}"
            + (f", ceiling {kl.ceiling_value:g}" if kl.ceiling_value is not None else ", no ceiling")
            + f"; {kl.controller.kind} controller: beta starts at {control.coef:.4g}"
            + (f" and can move between {low:.3g} and {high:.3g}" if low != high else " and stays")
        )
        scores = self.training.reference_scores
        for warning in [
            *scores.start_warnings(),
            *control.start_warnings(config.controlled_updates, batch),
            *start_notes(config),
        ]:
            log.warning(warning)

    def stop(self, row: dict[str, Any], reason: str) -> NoReturn:
        """End the run for a guard: the summary gets the reason, and the last checkpoint stays."""
        self.recorder.summary(steps=row["step"], episodes=row["episodes"], final=row, stopped_by=reason)
        raise GuardStop(reason)

    def finish(self) -> dict[str, Any]:
        """Evaluate once more, write `final/` and the summary."""
        # From the file: a resumed run has not seen all rows.
        rows = [row for row in read_jsonl(self.recorder.folder.metrics) if is_update(row)]
        step = self.config.updates
        self.scorers.begin(step + 1, self.config.updates)
        evaluated = self.look(log.warning)
        ui.show_work("writing final/")
        # The policy after the last update is the one that would sample the next row.
        row = {"step": step + 1, "episodes": step * self.config.rollout.batch_size, **evaluated}
        self.recorder.row(row)
        self.note_best_checkpoint(row | {"kl/error": rows[-1]["kl/error"] if rows else None})
        card = model_card(self.config, rows, row, adapter=has_adapter(self.parts.policy.module))
        write_final(self.recorder.folder.final, self.trainer.model, self.parts, card, keep=self.ranks.writes)
        return self.recorder.summary(
            steps=step,
            episodes=step * self.config.rollout.batch_size,
            final=(rows[-1] if rows else {}) | evaluated,
            best=self.best,
            best_checkpoint=self.best_checkpoint,
            control=closing_figures(rows, self.config.kl.unit),
            tilt_share=self.tilt_share(rows),
            reference=self.training.reference_scores.summary(),
            starting_coef=self.training.coef,
            learning_rate=self.trainer.rate.peak,
            stopped_by=None,
        )

    def tilt_share(self, rows: Sequence[dict[str, Any]]) -> float | None:
        """Score gain over that of the tilted reference samples at the same sequence KL; None where unknown.

        The tilt is the best that any policy can do at that KL, so 1 is the limit.
        """
        scores = self.training.reference_scores
        tail = [row for row in end(rows) if None not in (row["kl/sequence"], row["objective/scores_shaped"])]
        if not tail:
            return None
        gain = sum(row["objective/scores_shaped"] for row in tail) / len(tail) - scores.mean
        kl = sum(row["kl/sequence"] for row in tail) / len(tail)
        limit = scores.most_gain(kl)
        return gain / limit if limit else None
