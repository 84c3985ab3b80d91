"""`rlhf-kl sft` and `rlhf-kl reward-model`: a language model from texts, a reward model from preferences or labels."""

from __future__ import annotations

import time
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.load import Loader, base_name, new_language_model, recompute, with_adapter
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.world import with_files
from rlhf_kl.config.schema import Kind, RewardModelConfig, SFTConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import GuardStop, blame
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype, parameter_count
from rlhf_kl.models.lora import CLASSIFIER, checkpointed
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.rewards.model import RewardModel, TextFormat
from rlhf_kl.run.folders import write_folder
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.run.signals import stopping_on_signals
from rlhf_kl.seeding import derive_seed
from rlhf_kl.trainers.guards import all_finite
from rlhf_kl.trainers.supervised import SupervisedTrainer, Task
from rlhf_kl.trainers.tasks import LabelTask, PairTask, ResponseTask, TextTask
from rlhf_kl.ui import log


def run_supervised(config: SFTConfig | RewardModelConfig, folder: RunFolder, processes: Ranks) -> dict[str, Any]:
    """Train a language model or a reward model; returns the summary."""
    device = make_accelerator(config.run, group=True).device
    loader = Loader.for_run(config.run, device)
    task = processes.first_before_others(lambda: build_task(with_files(config), loader))
    settings = config.sft if isinstance(config, SFTConfig) else config.reward_model
    trainer = SupervisedTrainer(task, settings, config.run.seed, processes)
    kind: Kind = "sft" if isinstance(config, SFTConfig) else "reward-model"
    recorder = Recorder(folder, config, kind, device, {task.data: task.fingerprint}, processes)
    for note in task.notes:
        log.info(note)
    log.info(f"{len(task)} {task.unit}, {parameter_count(task.model):,} parameters, {trainer.steps} steps")
    try:
        recorder.begin()
        last = train_to_the_end(trainer, recorder)
        if processes.writes:
            write_folder(folder.final, task.save)
        heldout = {"heldout": figures} if (figures := task.distribution()) else {}
        return recorder.summary(steps=trainer.steps, final=last, **heldout, stopped_by=None)
    finally:
        recorder.close()


def train_to_the_end(trainer: SupervisedTrainer, recorder: Recorder) -> dict[str, Any]:
    """Train, evaluating before the first step, every `eval.every` steps, and after the last.

    Returns the last row, which is that of the final evaluation.
    """
    config, model, processes = recorder.config, trainer.model, recorder.processes
    start = 1
    if recorder.checkpoint is not None:
        recorder.checkpoint.load_model(checkpointed(model))
        recorder.checkpoint.load_optimizer(trainer.optimizer)
        trainer.microbatch.halve_to(recorder.state["microbatch"])
        start = recorder.checkpoint.step + 1
        log.info(f"going on from step {start - 1}")
    title = recorder.kind.replace("-", " ")
    with stopping_on_signals(config.checkpoint.grace) as stop, ui.progress(title, trainer.steps) as advance:
        advance(start - 1)
        rows, due = trainer.train(start), False
        for step in range(start, trainer.steps + 1):
            began = time.perf_counter()
            figures = trainer.task.evaluate(processes) if (step - 1) % config.eval.every == 0 else {}
            row = next(rows) | figures
            row["time/step_s"] = time.perf_counter() - began
            recorder.row(row)
            advance(1)
            for alert in row.get("alerts", []):
                log.warning(f"step {step}: {alert}")
            signalled = max(processes.all(stop.signal or 0))
            if trainer.stuck:
                reason = f"{trainer.skipped} steps in a row were skipped: their gradients were not finite"
                recorder.summary(steps=step, final=row, stopped_by=reason)
                raise GuardStop(reason)
            due = due or (step % config.checkpoint.every == 0 and step < trainer.steps)
            if (due or signalled) and not trainer.skipped and all(processes.all(all_finite(model.parameters()))):
                recorder.save(step, checkpointed(model), trainer.optimizer, {"microbatch": trainer.microbatch.halved})
                due = False
            stop.check(max(processes.all(stop.signal or 0)))
        last = {"step": trainer.steps + 1, **trainer.task.evaluate(processes)}
    recorder.row(last)
    return last


# ---- from a config to a task


def build_task(config: SFTConfig | RewardModelConfig, loader: Loader) -> Task:
    """The model and the data of a config. Errors: InputError for what cannot be used."""
    if isinstance(config, RewardModelConfig):
        return build_reward_task(config, loader)
    data, most = config.data, config.eval.max_documents
    dtype = compute_dtype(config.run.dtype)
    if data.response_column is None:
        texts, heldout = loader.documents(data)
        model, tokenizer = build_model(config, loader, [text for text in texts if text.strip()])
        return TextTask(LM(model, dtype), tokenizer, texts, heldout[:most])
    examples, kept = loader.examples(data)
    model, tokenizer = build_model(config, loader, [example.prompt + example.response for example in examples])
    return ResponseTask(
        LM(model, dtype),
        tokenizer,
        examples,
        kept[:most],
        chat=data.chat_template,
        system=data.system,
        options=data.chat_options,
        rows_of_a_pass=config.sft.microbatch_size,
    )


def build_model(config: SFTConfig, loader: Loader, texts: list[str]) -> tuple[Any, Any]:
    """The model to train and its tokenizer: a loaded one, or a new one whose tokenizer is made from `texts`."""
    section, seed = config.policy, config.run.seed
    if section.model is not None:
        seed = derive_seed(seed, "adapter")
        checkpointing = section.gradient_checkpointing
        loaded = loader.trained_model(section.model, section.lora, seed, gradient_checkpointing=checkpointing)
        return loaded.model.to(loader.device), loaded.tokenizer
    model, tokenizer = new_language_model(section.architecture, texts, seed)
    if section.gradient_checkpointing:
        recompute(model)
    return model.to(loader.device), tokenizer


def build_reward_task(config: RewardModelConfig, loader: Loader) -> Task:
    """A classifier on the trunk of the config's language model, and what it learns from."""
    section, data, most = config.policy, config.data, config.eval.max_pairs
    loaded = loader.language_model(section.model, "policy.model")
    with blame("policy.model"):
        model = classifier_from_lm(loaded.model, loaded.tokenizer, loader.access)
    initialise_head(model.score, derive_seed(config.run.seed, "head"))
    if section.lora is not None:
        seed = derive_seed(config.run.seed, "adapter")
        model = with_adapter(model, section.lora, base_name(section.model, loaded), seed, CLASSIFIER)
    if section.gradient_checkpointing:
        recompute(model)
    form = TextFormat(chat=data.chat_template)
    reward = RewardModel(model.to(loader.device), loaded.tokenizer, form=form, dtype=loader.dtype)
    if data.labels is not None:
        rows, labelled = loader.labelled(data)
        return LabelTask(reward, rows, labelled[:most])
    pairs, heldout = loader.pairs(data)
    return PairTask(reward, pairs, heldout[:most])
