"""`rlhf-kl reward-model`: a reward model from preference pairs or labelled texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rlhf_kl.commands.models import adapter_ref, load_language_model
from rlhf_kl.commands.resolver import Resolver
from rlhf_kl.commands.session import make_accelerator
from rlhf_kl.commands.supervised import run_supervised
from rlhf_kl.config.schema import RewardModelConfig
from rlhf_kl.models.fingerprint import texts_fingerprint
from rlhf_kl.models.load import check_vocabulary, parameter_count
from rlhf_kl.models.lora import CLASSIFIER, add_adapter
from rlhf_kl.models.recompute import enable_recompute
from rlhf_kl.models.scratch import classifier_from_lm
from rlhf_kl.processes import Processes
from rlhf_kl.rewards.model import RewardModel, TextFormat, save_reward_model
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.folders import write_folder
from rlhf_kl.run.record import Recorder
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.seeding import derive_seed
from rlhf_kl.trainers.labels import LabelObjective, is_binary
from rlhf_kl.trainers.reward_figures import calibration, histogram, label_figures, pair_figures
from rlhf_kl.trainers.reward_model import PairObjective, initialise_head
from rlhf_kl.trainers.supervised import Objective, SupervisedTrainer

Figures = dict[str, Any]


def run_reward_model(
    config: RewardModelConfig, folder: RunFolder, display: TrainingDisplay, processes: Processes
) -> dict[str, Any]:
    """Train a reward model; returns the summary."""
    device = make_accelerator(config.run, group=True).device
    resolver = Resolver.for_run(config.run, display, device)
    reward = processes.first_before_others(lambda: _new_reward_model(config, resolver))
    model = reward.model
    prepare = _learn_labels if config.data.labels is not None else _learn_pairs
    objective, evaluate, distribution, fingerprints = processes.first_before_others(
        lambda: prepare(config, resolver, reward, processes)
    )
    trainer = SupervisedTrainer(model, objective, config.reward_model, config.run.seed, processes)
    recorder = Recorder(folder, config, "reward-model", display, device, fingerprints, processes)
    rows = "pairs" if config.data.labels is None else "labelled texts"
    display.message(f"{len(objective)} {rows}, {parameter_count(model):,} parameters, {trainer.steps} steps")
    try:
        recorder.begin()
        last = run_supervised(recorder, trainer, model, evaluate, display, "reward model")
        if processes.writes:
            write_folder(folder.final, lambda place: save_reward_model(reward, place))
        return recorder.summary(steps=trainer.steps, final=last, heldout=distribution(), stopped_by=None)
    finally:
        recorder.close()


def _new_reward_model(config: RewardModelConfig, resolver: Resolver) -> RewardModel:
    loaded = load_language_model(resolver, config.policy.model, "policy.model")
    model = classifier_from_lm(loaded.model, loaded.tokenizer, "policy.model", resolver.access)
    initialise_head(model.score, derive_seed(config.run.seed, "head"))
    if (lora := config.policy.lora) is not None:
        model = add_adapter(
            model,
            r=lora.r,
            alpha=lora.alpha,
            target_modules=lora.target_modules,
            ref=adapter_ref(config.policy.model, loaded),
            what="policy.lora",
            seed=derive_seed(config.run.seed, "adapter"),
            task=CLASSIFIER,
        )
    if config.policy.gradient_checkpointing:
        enable_recompute(model, "policy.gradient_checkpointing")
    form = TextFormat(chat=config.data.chat_template)
    return RewardModel(model.to(resolver.device), loaded.tokenizer, form=form, dtype=resolver.dtype)


class Prepared(NamedTuple):
    """A training objective, and the evaluation of the trained model."""

    objective: Objective
    evaluate: Callable[[], Figures]
    distribution: Callable[[], Figures]  # calibration and score histogram on held-out data
    fingerprints: dict[str, str]  # of the training data, by config key


def _learn_pairs(config: RewardModelConfig, resolver: Resolver, reward: RewardModel, processes: Processes) -> Prepared:
    pairs, heldout = resolver.pairs(config.data)
    heldout = heldout[: config.eval.max_pairs]
    objective = PairObjective(reward, pairs)
    check_vocabulary(reward.model, reward.tokenizer, objective.chosen + objective.rejected, "data.pairs")

    def score(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        prompts = [pair.prompt for pair in heldout[part]]
        chosen = reward.score(prompts, [pair.chosen for pair in heldout[part]])
        return chosen, reward.score(prompts, [pair.rejected for pair in heldout[part]])

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = zip(*processes.parts(len(heldout), score), strict=True)
        return torch.cat(chosen), torch.cat(rejected)

    def distribution() -> Figures:
        chosen, rejected = scores()
        bins = calibration(chosen - rejected, chosen > rejected)[1]
        shown = histogram({"chosen": chosen, "rejected": rejected})
        return {"calibration": [part._asdict() for part in bins], "histogram": shown}

    fingerprints = {"data.pairs": texts_fingerprint(text for pair in pairs for text in pair)}
    return Prepared(objective, lambda: pair_figures(*scores()), distribution, fingerprints)


def _learn_labels(config: RewardModelConfig, resolver: Resolver, reward: RewardModel, processes: Processes) -> Prepared:
    rows, heldout = resolver.labelled(config.data)
    heldout = heldout[: config.eval.max_pairs]
    binary = is_binary([*rows, *heldout])
    resolver.display.message("labels are 0 and 1: a classifier" if binary else "labels are numbers: a regression")
    objective = LabelObjective(reward, rows, binary=binary)
    check_vocabulary(reward.model, reward.tokenizer, objective.encoded, "data.labels")
    labels = torch.tensor([row.label for row in heldout])

    def score(part: slice) -> torch.Tensor:
        texts = [row.text for row in heldout[part]]
        return reward.score([""] * len(texts), texts)

    def scores() -> torch.Tensor:
        return torch.cat(processes.parts(len(heldout), score))

    def distribution() -> Figures:
        values, positive = scores(), labels > 0.5
        if not binary:
            return {"histogram": histogram({"all": values})}
        bins = calibration(values, (values > 0) == positive)[1]
        shown = histogram({"label 1": values[positive], "label 0": values[~positive]})
        return {"calibration": [part._asdict() for part in bins], "histogram": shown}

    fingerprints = {"data.labels": texts_fingerprint(f"{row.label} {row.text}" for row in rows)}
    return Prepared(objective, lambda: label_figures(scores(), labels, binary=binary), distribution, fingerprints)
