"""`rlhf-kl reward-model`: a reward model from preference pairs."""

from __future__ import annotations

from typing import Any

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.checkpoint import write_folder
from rlhf_kl.commands.record import Recorder
from rlhf_kl.commands.session import pick_device
from rlhf_kl.commands.sources import Sources, split_heldout
from rlhf_kl.commands.supervised import run_supervised
from rlhf_kl.config.schema import RewardModelConfig
from rlhf_kl.models.fingerprint import texts_fingerprint
from rlhf_kl.models.load import load_tokenizer, parameter_count, save_model
from rlhf_kl.models.scratch import classifier_from_lm
from rlhf_kl.reward_functions import RewardModel
from rlhf_kl.seeding import derive_seed
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.tracking.run_folder import RunFolder
from rlhf_kl.trainers.reward_model import Pair, PairObjective, initialise_head, pair_accuracy
from rlhf_kl.trainers.supervised import SupervisedTrainer


def run_reward_model(
    config: RewardModelConfig, folder: RunFolder, display: TrainingDisplay, title: str = "reward model"
) -> dict[str, Any]:
    """Train a reward model; returns the summary."""
    device = pick_device(config.run)
    sources = Sources(display)
    pairs, heldout = _pairs(config, sources)
    ref = sources.policy(config.policy.model)
    tokenizer = load_tokenizer(ref, "policy.model")
    model = classifier_from_lm(ref, tokenizer, "policy.model")
    initialise_head(model.score, derive_seed(config.run.seed, "head"))
    model.to(device)
    reward = RewardModel(model, tokenizer)
    trainer = SupervisedTrainer(model, PairObjective(reward, pairs), config.reward_model, config.run.seed)
    found = {"data.pairs": texts_fingerprint(text for pair in pairs for text in pair)}
    recorder = Recorder(folder, config, "reward-model", display, device, found)
    display.message(f"{len(pairs)} pairs, {parameter_count(model):,} parameters, {trainer.steps} steps")
    try:
        recorder.begin()
        last = run_supervised(recorder, trainer, model, lambda: pair_accuracy(reward, heldout), display, title)
        write_folder(folder.final, lambda place: save_model(model, tokenizer, place))
        return recorder.summary(steps=trainer.steps, final=last, stopped_by=None)
    finally:
        recorder.close()


def _pairs(config: RewardModelConfig, sources: Sources) -> tuple[list[Pair], list[Pair]]:
    data = config.data
    names = (data.prompt_column, data.chosen_column, data.rejected_column)
    pairs = sources.pairs(data.pairs, names, "data.pairs", heldout=False)
    if data.eval_pairs is not None:
        kept = sources.pairs(data.eval_pairs, names, "data.eval_pairs", heldout=True)
    elif is_builtin(data.pairs):
        kept = sources.pairs(data.pairs, names, "data.pairs", heldout=True)
    else:
        pairs, kept = split_heldout(pairs, f"data.pairs: {data.pairs}")
    return pairs, kept[: config.eval.max_pairs]
