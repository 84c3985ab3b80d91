"""The run of a supervised trainer: rows, evaluations, checkpoints, summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from rlhf_kl.errors import GuardStop
from rlhf_kl.models.lora import checkpointed
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.signals import stopping_on_signals
from rlhf_kl.trainers.guards import all_finite
from rlhf_kl.trainers.supervised import SupervisedTrainer


def run_supervised(
    recorder: Recorder,
    trainer: SupervisedTrainer,
    model: nn.Module,
    evaluate: Callable[[], dict[str, Any]],
    display: TrainingDisplay,
    title: str,
) -> dict[str, Any]:
    """Train to the end, evaluating before the first step, every `eval.every` steps, and after the last.

    Returns the last row, which is that of the final evaluation.
    """
    config = recorder.config
    start = 1
    if recorder.checkpoint is not None:
        recorder.checkpoint.load_model(checkpointed(model))
        recorder.checkpoint.load_optimizer(trainer.optimizer)
        trainer.microbatch.halve_to(recorder.state["microbatch"])
        start = recorder.checkpoint.step + 1
        display.message(f"going on from step {start - 1}")
    every = config.eval.every
    with stopping_on_signals(config.checkpoint.grace) as stop, display.progress(title, trainer.steps) as advance:
        advance(start - 1)
        rows, due = trainer.train(start), False
        for step in range(start, trainer.steps + 1):
            began = time.perf_counter()
            figures = evaluate() if (step - 1) % every == 0 else {}
            row = next(rows) | figures
            row["time/step_s"] = time.perf_counter() - began
            recorder.row(row)
            advance(1)
            for alert in row.get("alerts", []):
                display.alert(f"step {step}: {alert}")
            signalled = max(recorder.processes.all(stop.signal or 0))
            if trainer.stuck:
                reason = f"{trainer.skipped} steps in a row were skipped: their gradients were not finite"
                recorder.summary(steps=step, final=row, stopped_by=reason)
                raise recorder.processes.shared(GuardStop(reason))
            due = due or (step % config.checkpoint.every == 0 and step < trainer.steps)
            broken = None if all_finite(model.parameters()) else "a weight"
            if (due or signalled) and not trainer.skipped and recorder.processes.agree(broken) is None:
                recorder.save(step, checkpointed(model), trainer.optimizer, {"microbatch": trainer.microbatch.halved})
                due = False
            stop.check(max(recorder.processes.all(stop.signal or 0)))
        last = {"step": trainer.steps + 1, **evaluate()}
    recorder.row(last)
    return last
