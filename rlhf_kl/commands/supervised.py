"""`rlhf-kl sft` and `rlhf-kl reward-model`: a language model from texts, a reward model from preferences or labels."""

from __future__ import annotations

import time
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.load import Loader, base_name, new_language_model, recompute, with_adapter
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.world import with_files
from rlhf_kl.config.schema import RewardModelConfig, SFTConfig
from rlhf_kl.errors import blame
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import compute_dtype, parameter_count
from rlhf_kl.models.lora import CLASSIFIER, checkpointed
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.monitors import worded
from rlhf_kl.ops.masked import all_finite
from rlhf_kl.rewards.model import RewardModel, TextFormat
from rlhf_kl.run.folder import write_folder
from rlhf_kl.run.run import Run
from rlhf_kl.seeding import derive_seed
from rlhf_kl.trainers.supervised import SupervisedTrainer, Task
from rlhf_kl.trainers.tasks import LabelTask, PairTask, ResponseTask, TextTask
from rlhf_kl.ui import log


def run_supervised(config: SFTConfig | RewardModelConfig, run: Run) -> dict[str, Any]:
    """Train a language model or a reward model; returns the summary."""
    device = make_accelerator(config.run, group=True).device
    loader = Loader.for_run(config.run, device)
    task = run.ranks.first_before_others(lambda: build_task(with_files(config), loader))
    settings = config.sft if isinstance(config, SFTConfig) else config.reward_model
    trainer = SupervisedTrainer(task, settings, config.run.seed, run.ranks)
    run.check(device, {task.data: task.fingerprint})
    run.track(model=checkpointed(trainer.model), optimizer=trainer.optimizer, microbatch=trainer.microbatch)
    for note in task.notes:
        log.info(note)
    log.info(f"{len(task)} {task.unit}, {parameter_count(task.model):,} parameters, {trainer.steps} steps")
    run.begin()
    last = train_to_the_end(trainer, run)
    if run.ranks.writes:
        write_folder(run.folder.final, task.save)
    heldout = {"heldout": figures} if (figures := task.distribution()) else {}
    return run.finish(steps=trainer.steps, final=last, **heldout, stopped_by=None)


def train_to_the_end(trainer: SupervisedTrainer, run: Run) -> dict[str, Any]:
    """Train, evaluating before the first step, every `eval.every` steps, and after the last.

    Returns the last row, which is that of the final evaluation.
    """
    ranks = run.ranks
    with ui.progress(run.kind.replace("-", " "), trainer.steps) as advance:
        advance(run.next_step - 1)
        rows = trainer.train(run.next_step)
        for step in run.steps(trainer.steps):
            began = time.perf_counter()
            figures = trainer.task.evaluate(ranks) if (step - 1) % run.config.eval.every == 0 else {}
            row = next(rows) | figures
            row["time/step_s"] = time.perf_counter() - began
            if alerts := worded(trainer.facts):
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
