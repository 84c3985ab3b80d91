"""`rlhf-kl sft`: a language model from texts or responses, from scratch or from a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rlhf_kl.commands.models import load_trained_model, new_language_model
from rlhf_kl.commands.resolver import Resolver
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.supervised import run_supervised
from rlhf_kl.config.schema import SFTConfig
from rlhf_kl.data.chat import require_chat_template
from rlhf_kl.data.texts import Example
from rlhf_kl.errors import InputError
from rlhf_kl.evaluate import perplexity_of, text_sums
from rlhf_kl.memory import fitting_batches
from rlhf_kl.models.fingerprint import texts_fingerprint
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.load import check_vocabulary, compute_dtype, context_length, eos_ids, parameter_count, save_model
from rlhf_kl.models.recompute import enable_recompute
from rlhf_kl.processes import Processes
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.folders import write_folder
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.seeding import derive_seed
from rlhf_kl.trainers.responses import ResponseObjective
from rlhf_kl.trainers.sft import TextObjective
from rlhf_kl.trainers.supervised import Objective, SupervisedTrainer

Figures = dict[str, Any]


def run_sft(config: SFTConfig, folder: RunFolder, display: TrainingDisplay, processes: Processes) -> dict[str, Any]:
    """Train a language model; returns the summary."""
    device = make_accelerator(config.run, group=True).device
    resolver = Resolver.for_run(config.run, display, device)
    responses = config.data.response_column is not None
    prepare = _learn_responses if responses else _learn_texts
    prepared = processes.first_before_others(lambda: prepare(config, resolver, display, processes))
    model, tokenizer, objective, evaluate, fingerprint = prepared
    trainer = SupervisedTrainer(model, objective, config.sft, config.run.seed, processes)
    recorder = Recorder(folder, config, "sft", display, device, {"data.texts": fingerprint}, processes)
    rows = "responses" if responses else "texts"
    display.message(f"{len(objective)} {rows}, {parameter_count(model):,} parameters, {trainer.steps} steps")
    try:
        recorder.begin()
        last = run_supervised(recorder, trainer, model, evaluate, display, "sft")
        if processes.writes:
            write_folder(folder.final, lambda place: save_model(model, tokenizer, place))
        return recorder.summary(steps=trainer.steps, final=last, stopped_by=None)
    finally:
        recorder.close()


class Prepared(NamedTuple):
    """A model, its training objective, and its evaluation."""

    model: Any
    tokenizer: Any
    objective: Objective
    evaluate: Callable[[], Figures]
    fingerprint: str  # of the training data


def _learn_texts(config: SFTConfig, resolver: Resolver, display: TrainingDisplay, processes: Processes) -> Prepared:
    texts, heldout = resolver.documents(config.data)
    heldout = heldout[: config.eval.max_documents]
    texts = _without_empty(texts, display)
    model, tokenizer = _model(config, resolver, texts)
    lm = TransformersLM(model, compute_dtype(config.run.dtype))
    objective = TextObjective(lm, tokenizer, texts, context_length(model))
    check_vocabulary(model, tokenizer, objective.rows, "data.texts")
    _report_truncated(objective.truncated, len(texts), "texts", display)

    def evaluate() -> Figures:
        read = processes.parts(len(heldout), lambda part: text_sums(lm, tokenizer, heldout[part]))
        figures = perplexity_of(read)
        return {
            "eval/loss": figures.nats_per_token,
            "eval/perplexity": figures.perplexity,
            "eval/bits_per_byte": figures.bits_per_byte,
        }

    return Prepared(model, tokenizer, objective, evaluate, texts_fingerprint(texts))


def _learn_responses(config: SFTConfig, resolver: Resolver, display: TrainingDisplay, processes: Processes) -> Prepared:
    data = config.data
    examples, heldout = resolver.examples(data)
    model, tokenizer = _model(config, resolver, [example.prompt + example.response for example in examples])
    if data.chat_template:
        require_chat_template(tokenizer, "data.chat_template")
    context, ends = context_length(model), eos_ids(model, tokenizer)
    lm = TransformersLM(model, compute_dtype(config.run.dtype))

    def objective(rows: list[Example]) -> ResponseObjective:
        made = ResponseObjective(lm, tokenizer, rows, context, ends, chat=data.chat_template, system=data.system)
        check_vocabulary(model, tokenizer, made.rows, "data.texts")
        return made

    train, kept = objective(examples), objective(heldout[: config.eval.max_documents])
    _report_truncated(train.truncated, len(examples), "responses", display)
    if train.left_out:
        display.message(f"{train.left_out} of {len(examples)} rows left out: their prompts fill the context")

    @torch.no_grad()
    def read_part(part: slice) -> float:
        rows = sorted(range(part.start, part.stop), key=kept.size)

        def read(start: int, stop: int) -> float:
            return float(kept.loss(rows[start:stop])[0])

        change = "use shorter texts to evaluate on"
        return sum(fitting_batches(len(rows), config.sft.microbatch_size, read, change))

    def evaluate() -> Figures:
        loss = sum(processes.parts(len(kept), read_part)) / sum(kept.weight(row) for row in range(len(kept)))
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    fingerprint = texts_fingerprint(text for example in examples for text in example)
    return Prepared(model, tokenizer, train, evaluate, fingerprint)


def _without_empty(texts: list[str], display: TrainingDisplay) -> list[str]:
    full = [text for text in texts if text.strip()]
    if not full:
        raise InputError(f"data.texts: all {len(texts)} texts are empty")
    if len(full) < len(texts):
        display.message(f"data.texts: {len(texts) - len(full)} of {len(texts)} texts left out: empty")
    return full


def _report_truncated(count: int, total: int, rows: str, display: TrainingDisplay) -> None:
    if count:
        display.message(f"{count} of {total} {rows} are longer than the context and are cut off")


def _model(config: SFTConfig, resolver: Resolver, texts: list[str]) -> tuple[Any, Any]:
    section, seed = config.policy, config.run.seed
    if section.model is not None:
        loaded = load_trained_model(
            resolver,
            section.model,
            section.lora,
            "policy.model",
            seed=derive_seed(seed, "adapter"),
            gradient_checkpointing=section.gradient_checkpointing,
        )
        return loaded.model.to(resolver.device), loaded.tokenizer
    model, tokenizer = new_language_model(section.architecture, texts, seed)
    if section.gradient_checkpointing:
        enable_recompute(model, "policy.gradient_checkpointing")
    return model.to(resolver.device), tokenizer
