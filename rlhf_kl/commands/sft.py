"""`rlhf-kl sft`: a language model from texts, from scratch or from a model."""

from __future__ import annotations

from typing import Any

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.checkpoint import write_folder
from rlhf_kl.commands.record import Recorder
from rlhf_kl.commands.session import pick_device
from rlhf_kl.commands.sources import Sources, split_heldout
from rlhf_kl.commands.supervised import run_supervised
from rlhf_kl.config.schema import SFTConfig
from rlhf_kl.errors import InputError
from rlhf_kl.evaluate import perplexity
from rlhf_kl.models.fingerprint import texts_fingerprint
from rlhf_kl.models.load import context_length, load_causal_lm, load_tokenizer, parameter_count, save_model
from rlhf_kl.models.scratch import new_gpt2
from rlhf_kl.models.tokenizer import train_tokenizer
from rlhf_kl.seeding import derive_seed
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.tracking.run_folder import RunFolder
from rlhf_kl.trainers.sft import TextObjective
from rlhf_kl.trainers.supervised import SupervisedTrainer


def run_sft(config: SFTConfig, folder: RunFolder, display: TrainingDisplay, title: str = "sft") -> dict[str, Any]:
    """Train a language model; returns the summary."""
    device = pick_device(config.run)
    sources = Sources(display)
    texts, heldout = _texts(config, sources)
    model, tokenizer = _model(config, sources, texts)
    model.to(device)
    objective = TextObjective(model, tokenizer, texts, context_length(model))
    if objective.truncated:
        display.message(f"{objective.truncated} of {len(texts)} texts are longer than the context and are cut off")
    trainer = SupervisedTrainer(model, objective, config.sft, config.run.seed)
    found = {"data.texts": texts_fingerprint(texts)}
    recorder = Recorder(folder, config, "sft", display, device, found)
    display.message(f"{len(texts)} texts, {parameter_count(model):,} parameters, {trainer.steps} steps")

    def evaluate() -> dict[str, Any]:
        figures = perplexity(model, tokenizer, heldout)
        return {"eval/perplexity": figures.perplexity, "eval/bits_per_byte": figures.bits_per_byte}

    try:
        recorder.begin()
        last = run_supervised(recorder, trainer, model, evaluate, display, title)
        write_folder(folder.final, lambda place: save_model(model, tokenizer, place))
        return recorder.summary(steps=trainer.steps, final=last, stopped_by=None)
    finally:
        recorder.close()


def _texts(config: SFTConfig, sources: Sources) -> tuple[list[str], list[str]]:
    data, limit = config.data, config.eval.max_documents
    texts = sources.texts(data.texts, data.column, "data.texts", heldout=False, limit=data.max_documents)
    if data.eval_texts is not None:
        kept = sources.texts(data.eval_texts, data.column, "data.eval_texts", heldout=True)
    elif is_builtin(data.texts):
        kept = sources.texts(data.texts, data.column, "data.texts", heldout=True)
    else:
        texts, kept = split_heldout(texts, f"data.texts: {data.texts}")
    empty = sum(not text.strip() for text in texts)
    if empty:
        raise InputError(f"data.texts: {empty} of {len(texts)} texts are empty")
    return texts, kept[:limit]


def _model(config: SFTConfig, sources: Sources, texts: list[str]) -> tuple[Any, Any]:
    if config.policy.model is not None:
        ref = sources.policy(config.policy.model)
        return load_causal_lm(ref, "policy.model"), load_tokenizer(ref, "policy.model")
    shape = config.policy.architecture
    tokenizer = train_tokenizer(texts, shape.vocab_size, shape.context)
    model = new_gpt2(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        context=shape.context,
        tokenizer=tokenizer,
        seed=derive_seed(config.run.seed, "weights"),
    )
    return model, tokenizer
