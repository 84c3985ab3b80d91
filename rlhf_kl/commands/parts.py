"""From a config to the models and data of a run; what cannot work is refused here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlhf_kl.commands.models import Loaded, load_language_model, load_trained_model
from rlhf_kl.commands.resolver import Resolver, access_of
from rlhf_kl.config.schema import PromptsSection, TrainConfig
from rlhf_kl.data.prompts import PromptFormat, Prompts, PromptStream, prepare_prompts
from rlhf_kl.errors import InputError
from rlhf_kl.models.actor_critic import (
    ActorCritic,
    choose_trunk_way,
    freeze,
    plain_reason,
    value_head_from_reward,
)
from rlhf_kl.models.compiled import slower_reason
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.models.load import check_vocabulary, context_length, eos_ids
from rlhf_kl.models.lora import AdapterReference, has_adapter
from rlhf_kl.reward_functions import GoldScorer, RewardModel, ScoreShaping, WeightedSum
from rlhf_kl.rollout.collect import Sampling
from rlhf_kl.rollout.features import feature_count
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.seeding import derive_seed
from rlhf_kl.types import RewardFn

EVAL_PROMPTS = 64


@dataclass
class Parts:
    """The models and data of a run."""

    policy: Any
    reference: Any
    tokenizer: Any
    reward: RewardFn
    gold: GoldScorer | None
    prompts: PromptStream
    heldout: PromptStream
    texts: list[str]
    sampling: Sampling
    same_start: bool  # the reference is the starting policy


def build_parts(config: TrainConfig, accelerator: Any, display: TrainingDisplay) -> Parts:
    """Load everything that the config names, and refuse what cannot work."""
    device = accelerator.device
    sources = Resolver(display, device, access_of(config.run))
    section = config.policy
    loaded = load_trained_model(
        sources,
        section.model,
        section.lora,
        "policy.model",
        seed=derive_seed(config.run.seed, "adapter"),
        gradient_checkpointing=section.gradient_checkpointing,
    )
    policy, tokenizer = loaded.model.to(device), loaded.tokenizer
    if reason := plain_reason(policy):
        display.message(f"policy.model: logits are computed at every position, not at responses only: {reason}")
    if reason := slower_reason(policy, config.run.dtype):
        display.message(f"policy.model: updates take up to 1.7 times as long without compiled functions: {reason}")
    reference, same = build_reference(config, sources, loaded)
    reward = sources.reward(config.reward)
    gold = sources.gold(config.reward, config.reward.model or "", config.data.prompts)
    batch = config.rollout.batch_size
    if batch % accelerator.num_processes:
        raise InputError(f"rollout.batch_size: {accelerator.num_processes} processes do not divide {batch}")
    train, kept = build_prompts(config, sources, policy, tokenizer)
    prompts = PromptStream(train.texts, tokenizer, batch, config.run.seed, train.rows)
    heldout = PromptStream(kept.texts, tokenizer, min(EVAL_PROMPTS, len(kept.texts)), config.run.seed, kept.rows)
    texts = sources.texts(
        config.eval.texts,
        config.eval.column,
        "eval.texts",
        heldout=True,
        limit=config.eval.max_documents,
        split=config.eval.split,
    )
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        eos_ids=eos_ids(policy, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
    return Parts(policy, reference, tokenizer, reward, gold, prompts, heldout, texts, sampling, same)


def build_reference(config: TrainConfig, sources: Resolver, loaded: Loaded) -> tuple[Any, bool]:
    """The frozen model that the KL is measured to, and whether it is the starting policy.

    Of a policy with an adapter it is the same model at its start, with no second copy of the weights.
    """
    ref, policy = config.reference.model, loaded.model
    if ref is None or sources.policy(ref, "reference.model") == loaded.folder:
        if has_adapter(policy):
            return AdapterReference(policy, keep_start=loaded.began_as_adapter), True
        return freeze(copy.deepcopy(policy)).to(sources.device), True
    reference = load_language_model(sources, ref, "reference.model").model
    if reference.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise InputError("reference.model: has another vocabulary than policy.model: no KL between them")
    return freeze(reference).to(sources.device), False


def build_prompts(config: TrainConfig, sources: Resolver, policy: Any, tokenizer: Any) -> tuple[Prompts, Prompts]:
    """Prompts to train on and held-out ones, as tokens that fit into the context beside the response."""
    context = context_length(policy)
    room = None if context is None else context - config.rollout.max_new_tokens
    form = prompt_format(config.data)
    train_texts, kept_texts = sources.prompts(config.data, config.eval)
    train = prepare_prompts(train_texts, tokenizer, room, "data.prompts", form)
    kept = prepare_prompts(kept_texts, tokenizer, room, "eval.prompts", form)
    if kept_texts is not train_texts:  # prompts that were cut short may have become the same
        train = without_rows(train, kept)
    for prompts in (train, kept):
        check_vocabulary(policy, tokenizer, prompts.rows, "data.prompts")
        if prompts.note and prompts.texts is not train_texts:
            sources.display.message(prompts.note)
    return train, kept


def without_rows(train: Prompts, kept: Prompts) -> Prompts:
    """The prompts whose tokens no held-out prompt has. Errors: InputError where none is left."""
    apart = {tuple(row) for row in kept.rows}
    rest = [i for i, row in enumerate(train.rows) if tuple(row) not in apart]
    if not rest:
        raise InputError("data.prompts: every prompt is among the held-out ones too; name others as eval.prompts")
    dropped = len(train.rows) - len(rest)
    if not dropped:
        return train
    note = f"data.prompts: {dropped} of {len(train.rows)} prompts left out: they are among the held-out ones"
    texts, rows = [train.texts[i] for i in rest], [train.rows[i] for i in rest]
    return Prompts(texts, rows, f"{train.note}; {note}" if train.note else note)


def prompt_format(data: PromptsSection) -> PromptFormat:
    """How the config wants prompts written."""
    return PromptFormat(data.chat_template, data.system, data.first_tokens)


def build_value(config: TrainConfig, parts: Parts, shaping: ScoreShaping, mean: float, std: float) -> ActorCritic:
    """The policy with its value function: a critic on features, a zero head on its trunk, or a trunk of its own.

    The separate one starts from the reward model where that reads the policy's rows, else from the policy.
    `mean` and `std`: of the reference's shaped scores.
    """
    if config.policy.value == "features":
        size = feature_count(parts.reference, feature_rewards(parts))
        return ActorCritic(parts.policy, critic=FeatureCritic(size, mean, std, config.run.seed))
    if config.policy.value == "head":
        return ActorCritic(parts.policy)
    reward = parts.reward
    if isinstance(reward, RewardModel) and _reads_rows_of(parts, reward) and _has_one_output(reward):
        trunk = copy.deepcopy(reward.model.base_model)
        head: nn.Linear | None = value_head_from_reward(reward.model.score, shaping.mean, shaping.std)
    else:
        policy = copy.deepcopy(parts.policy)
        trunk, head = (policy.unload() if has_adapter(policy) else policy).base_model, None
    for parameter in trunk.parameters():
        parameter.requires_grad_(True)
    choose_trunk_way(trunk)
    return ActorCritic(parts.policy, trunk, head)


def feature_rewards(parts: Parts) -> list[RewardModel]:
    """The reward models that can read the policy's tokens as they come, whole responses of them."""
    reward = parts.reward
    every = [term for _, term in reward.terms.values()] if isinstance(reward, WeightedSum) else [reward]
    return [one for one in every if isinstance(one, RewardModel) and _reads_rows_of(parts, one)]


def _has_one_output(reward: RewardModel) -> bool:
    return bool(reward.model.score.out_features == 1)


def _reads_rows_of(parts: Parts, reward: RewardModel) -> bool:
    """Whether it can take prompts and responses as the policy's tokens, from beginning to end, one state a token.

    An encoder never does: its states know of later tokens.
    """
    if reward.encoder or reward.tokenizer.get_vocab() != parts.tokenizer.get_vocab():
        return False
    return reward.limit is None or parts.prompts.longest + parts.sampling.max_new_tokens <= reward.limit
