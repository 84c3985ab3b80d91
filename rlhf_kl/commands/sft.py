"""`rlhf-kl sft` and `rlhf-kl reward-model`: a language model from texts, a reward model from preferences or labels."""

from __future__ import annotations

import time
from typing import Any

from rlhf_kl import ui
from rlhf_kl.config.schema import RewardModelConfig, SFTConfig
from rlhf_kl.events import worded
from rlhf_kl.models.lora import checkpointed
from rlhf_kl.models.pretrained import parameter_count
from rlhf_kl.ops.masked import all_finite
from rlhf_kl.run.folder import write_folder
from rlhf_kl.run.run import Run
from rlhf_kl.supervised.fit import SupervisedTrainer
from rlhf_kl.training.device import run_device
from rlhf_kl.training.load import Loader
from rlhf_kl.training.tasks import build_task
from rlhf_kl.training.world_files import with_files
from rlhf_kl.ui import log


def run_supervised(config: SFTConfig | RewardModelConfig, run: Run) -> dict[str, Any]:
    """Train a language model or a reward model; returns the summary."""
    device = run_device(config.run, group=True)
    loader = Loader(config.run, device)
    task = run.ranks.first_before_others(lambda: build_task(with_files(config), loader))
    settings = config.sft if isinstance(config, SFTConfig) else config.reward_model
    new = isinstance(config, SFTConfig) and config.policy.model is None
    trainer = SupervisedTrainer(task, settings, config.run.seed, run.ranks, config.run.dtype, new=new)
    run.check(config, device, {task.data: task.fingerprint})
    scale = {} if trainer.scale is None else {"scale": trainer.scale}
    run.track(model=checkpointed(trainer.model), optimizer=trainer.optimizer, **scale)
    for note in task.notes:
        log.info(note)
    size, peak = parameter_count(task.model), trainer.peak
    log.info(f"{len(task)} {task.unit}, {size:,} parameters, {trainer.steps} steps, learning rate {peak:g}")
    run.begin(trainer.steps)
    log.info(run.interval.words())
    last = train_to_the_end(trainer, run)
    if run.ranks.writes:
        write_folder(run.folder.final, task.save)
    heldout = {"heldout": figures} if (figures := task.distribution()) else {}
    return run.finish(steps=trainer.steps, final=last, **heldout, stopped_by=None)


def train_to_the_end(trainer: SupervisedTrainer, run: Run) -> dict[str, Any]:
    """Train, evaluating before the first step, every `eval.every` steps, and after the last.

    Returns the last row, which is that of the final evaluation.
    """
    ranks, every = run.ranks, run.config.eval.every
    assert every != "auto"  # which only a TrainConfig has
    with ui.progress(run.kind.replace("-", " "), trainer.steps) as advance:
        advance(run.next_step - 1)
        for step in run.steps():
            began = time.perf_counter()
            figures = trainer.task.evaluate(ranks) if (step - 1) % every == 0 else {}
            row = trainer.step(step) | figures
            row["time/step_s"] = time.perf_counter() - began
            if alerts := worded(trainer.events):
                row["alerts"] = alerts
            run.log(row, sound=not trainer.skipped and all(ranks.all(all_finite(trainer.model.parameters()))))
            advance(1)
            for alert in alerts:
                log.warning(f"step {step}: {alert}")
            if trainer.stuck:
                run.stop(row, f"{trainer.skipped} steps in a row were skipped: their gradients were not finite")
        last = {"step": trainer.steps + 1, **trainer.task.evaluate(ranks)}
    run.log(last)
    return last
