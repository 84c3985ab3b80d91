"""From a config of `sft` or `reward-model` to what is trained: a model with its data."""

from __future__ import annotations

from typing import Any

from rlhf_kl.config.named import check_named
from rlhf_kl.config.schema import RewardModelConfig, SFTConfig
from rlhf_kl.data.chat import plain_text
from rlhf_kl.errors import blame
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import CLASSIFIER
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head, new_gpt2, train_tokenizer
from rlhf_kl.rewards.model import RewardModel, TextFormat
from rlhf_kl.seeding import derive_seed
from rlhf_kl.supervised.fit import Task
from rlhf_kl.supervised.kinds import LabelTask, PairTask, ResponseTask, TextTask
from rlhf_kl.training import sets
from rlhf_kl.training.load import Loader, base_name, tuned
from rlhf_kl.training.sets import drawn


def build_task(config: SFTConfig | RewardModelConfig, loader: Loader) -> Task:
    """The data and the model of a config `with_files`. Errors: InputError for what cannot be used."""
    check_named(config, download=True)
    if isinstance(config, RewardModelConfig):
        rows = sets.pairs(config.data) if config.data.labels is None else sets.labelled(config.data)
        return build_reward_task(config, loader, *rows)
    data, most = config.data, config.eval.max_documents
    if data.response_column is None:
        texts, heldout = sets.documents(data)
        model, tokenizer = build_model(config, loader, texts)
        return TextTask(LM(model, loader.dtype), tokenizer, texts, drawn(heldout, most))
    examples, kept = sets.examples(data)
    texts = [plain_text(example.prompt) + example.response for example in examples]
    model, tokenizer = build_model(config, loader, texts)
    return ResponseTask(
        LM(model, loader.dtype),
        tokenizer,
        examples,
        drawn(kept, most),
        chat=data.chat_template,
        system=data.system,
        options=data.chat_options,
        rows_of_a_pass=config.sft.microbatch_size,
    )


def build_model(config: SFTConfig, loader: Loader, texts: list[str]) -> tuple[Any, Any]:
    """The model to train and its tokenizer: a loaded one, or a new one whose tokenizer is made from `texts`."""
    section, seed = config.policy, config.run.seed
    if section.model is not None:
        loaded = loader.trained_model(section.model, section, seed)
        return loaded.model.to(loader.device), loaded.tokenizer
    shape = section.architecture
    tokenizer = train_tokenizer(texts, shape.vocab_size, shape.context)
    sizes = shape.model_dump() | {"vocab_size": len(tokenizer)}
    model = new_gpt2(**sizes, tokenizer=tokenizer, seed=derive_seed(seed, "weights"))
    return tuned(model, section, "", seed).to(loader.device), tokenizer


def build_reward_task(config: RewardModelConfig, loader: Loader, train: list[Any], kept: list[Any]) -> Task:
    """A classifier on the trunk of the config's language model, and what it learns from."""
    section, data, most = config.policy, config.data, config.eval.max_pairs
    loaded = loader.language_model(section.model, "policy.model")
    with blame("policy.model"):
        model = classifier_from_lm(loaded.model, loaded.tokenizer, loader.access)
    initialise_head(model.score, derive_seed(config.run.seed, "head"))
    model = tuned(model, section, base_name(section.model, loaded), config.run.seed, CLASSIFIER)
    form = TextFormat(chat=data.chat_template)
    reward = RewardModel(model.to(loader.device), loaded.tokenizer, form=form, dtype=loader.dtype)
    return (PairTask if data.labels is None else LabelTask)(reward, train, drawn(kept, most))
