"""Builds the models and data of a run from its config, and refuses what cannot work."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from rlhf_kl.config.named import check_named, configured_controller
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data import sets
from rlhf_kl.data.prompts import PromptStream, prepare_prompts, resolved_form
from rlhf_kl.data.rows import PromptRow, read_texts
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError, blame
from rlhf_kl.models.engine import VLLM, require_engine
from rlhf_kl.models.lm import LM, Trunk
from rlhf_kl.models.lora import AdapterReference, adapter_base, blame_base, has_adapter
from rlhf_kl.models.pretrained import (
    check_vocabulary,
    context_length,
    eos_ids,
    model_fingerprint,
    parameter_count,
    texts_fingerprint,
    tokenizer_fingerprint,
)
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.models.value import (
    ActorCritic,
    FeatureCritic,
    HeadValue,
    SeparateValue,
    store_frozen,
    value_head_from_reward,
    zero_head,
)
from rlhf_kl.ops.masked import Mean
from rlhf_kl.optim import adamw, usual_learning_rate
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.states import ReferenceStates, StateFeatures
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.ppo.way import same_weights, way_from
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.run.log import Clock
from rlhf_kl.sharding import shard_trained
from rlhf_kl.train.load import Loaded, Loader
from rlhf_kl.train.world_files import with_files
from rlhf_kl.types import Prompts, Sampling
from rlhf_kl.ui import log


@dataclass
class Setup:
    """The models and data of a run."""

    policy: LM
    reference: LM
    tokenizer: Any
    scorers: Scorers
    prompts: PromptStream
    heldout: PromptStream
    texts: list[str]
    sampling: Sampling
    reference_is_initial_policy: bool
    chat: bool  # whether prompts are written with a chat template
    fingerprints: dict[str, str] = field(default_factory=dict)  # of what a resumed run needs unchanged, by config key
    trunk: Trunk | None = None  # of a separate value function
    sharded: list[nn.Module] = field(default_factory=list)
    engine: VLLM | None = None  # of the rollouts, in place of the policy itself

    def resolved(self, config: TrainConfig) -> TrainConfig:
        """With what `data.chat_template` auto stands for, so that the stored config tells it."""
        return config.model_copy(update={"data": config.data.model_copy(update={"chat_template": self.chat})})


def build_setup(config: TrainConfig, device: torch.device) -> Setup:
    """Load everything that the config names, what takes longest last, and refuse what cannot work.

    Models that are to be sharded stay on the CPU, see `shard_models`.
    """
    loader = Loader(config.run, device, mapped=config.policy.shard)
    frozen = Loader(config.run, device, mapped=config.reference.shard)
    require_engine(config.rollout.engine)
    check_named(config, download=True)
    files = with_files(config, ("data", "eval"))
    held = config.eval
    rows = sets.prompts(files.data, files.eval)
    read = partial(read_texts, column=held.column, key="eval.column:")
    texts = sets.evaluated(sets.load("eval.texts", files.eval.texts, held.split, read, held.most_texts), held)
    config = with_files(config)
    loaded = loader.trained_model(config.policy.model, config.policy, config.run.seed)
    model = loaded.model.to(loader.device)
    tokenizer = loaded.tokenizer
    reference, is_initial_policy = build_reference(config, frozen, loaded)
    scorers = frozen.scorers(config.reward)
    form = resolved_form(config.data, rows[0], tokenizer)
    train, kept = build_prompts(config.model_copy(update={"data": form}), rows, model, tokenizer)
    for prompts in (train, kept):
        scorers.columns_of(prompts)
    with blame("eval.texts"):
        check_vocabulary(model, tokenizer, encode_all(tokenizer, texts))
    scorers.begin(1, config.updates)
    batch, samples = config.rollout.batch_size, config.rollout.samples_per_prompt
    stream = PromptStream(train, batch, config.run.seed, samples)
    heldout = PromptStream(kept, held.most_responses, config.run.seed)  # few prompts: each is answered more than once
    sampling = sampling_of(config, model, tokenizer)
    policy = LM(model, loader.dtype)
    longest, options = stream.longest + sampling.max_new_tokens, config.rollout.engine_options
    setup = Setup(
        policy,
        reference,
        tokenizer,
        scorers,
        stream,
        heldout,
        texts,
        sampling,
        is_initial_policy,
        bool(form.chat_template),
        engine=None if config.rollout.engine is None else VLLM(policy, longest, options),
    )
    setup.fingerprints = fingerprints(setup)
    if config.critic == "separate":
        setup.trunk = value_trunk(setup)
    stored = [] if config.policy.shard else [model]  # in a sharded layer, what is trained decides
    for each in [*stored, *([] if config.reference.shard else frozen_models(setup))]:
        store_frozen(each, loader.dtype)
    return setup


def sampling_of(config: TrainConfig, model: Any, tokenizer: Any) -> Sampling:
    """The sampling settings of a run."""
    return Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        eos_ids=eos_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )


def build_reference(config: TrainConfig, loader: Loader, loaded: Loaded) -> tuple[LM, bool]:
    """The frozen model that the KL is measured to (of an adapter no copy), and whether the policy starts as it."""
    ref = config.reference.model
    policy = loaded.model
    with blame("reference.model"):
        folder = loaded.folder if ref is None else loader.folder(ref)
    with blame_base(loaded.folder):
        is_base = loaded.began_as_adapter and folder == loader.folder(adapter_base(loaded.folder))
    if ref is None or folder == loaded.folder or is_base:
        if has_adapter(policy):
            keep_start = loaded.began_as_adapter and not is_base
            return AdapterReference(policy, loader.dtype, keep_start=keep_start), not is_base
        again = config.policy.shard or config.reference.shard  # a copy takes memory, a mapped file none
        load = loader.language_model
        return loader.frozen(load(config.policy.model, "policy.model").model if again else copy.deepcopy(policy)), True
    reference = loader.language_model(ref, "reference.model").model
    if reference.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise InputError("reference.model: has another vocabulary than policy.model, so there is no KL between them")
    # A copy under another name is the start too. An adapter is none: it begins as what it is added to.
    return loader.frozen(reference), not has_adapter(policy) and same_weights(policy, reference)


def build_prompts(
    config: TrainConfig, read: Sequence[list[PromptRow]], policy: Any, tokenizer: Any
) -> tuple[Prompts, Prompts]:
    """Prompts to train on and held-out ones, as tokens that fit into the context beside the response."""
    context = context_length(policy)
    new = config.rollout.max_new_tokens
    if context is not None and new >= context:
        raise InputError(f"rollout.max_new_tokens: {new} + a prompt > {context}, the model's context: lower it")
    room = None if context is None else context - new
    train_rows, kept_rows = read
    form = resolved_form(config.data, train_rows, tokenizer)
    train = usable_prompts("data.prompts", train_rows, policy, tokenizer, room, form)
    kept = usable_prompts("eval.prompts", kept_rows, policy, tokenizer, room, form)
    if kept_rows is not train_rows:  # prompts that were cut short may have become the same
        numbered, held = (list(enumerate(map(tuple, prompts.ids))) for prompts in (train, kept))
        if {ids for _, ids in numbered} <= {ids for _, ids in held}:
            raise InputError(
                "data.prompts: as tokens, every prompt is a held-out one too: the policy's tokenizer (or "
                f"data.first_tokens) leaves no more of {train.texts[0][:60]!r} than {train.ids[0][:8]}"
            )
        rest, _ = sets.divided("data.prompts", numbered, held, lambda pair: pair[1])
        train = train.pick([number for number, _ in rest])
    return train, kept


def usable_prompts(
    key: str, rows: Sequence[PromptRow], policy: Any, tokenizer: Any, room: int | None, form: PromptsSection
) -> Prompts:
    """The prompts under `key` that have at most `room` tokens. Errors: InputError if there is none."""
    with blame(key):
        prompts, left_out = prepare_prompts(rows, tokenizer, room, form)
        check_vocabulary(policy, tokenizer, prompts.ids)
    if left_out:
        log.info(f"{key}: {left_out}")
    return prompts


def build_value(config: TrainConfig, setup: Setup, shaping: ScoreShaping, mean: float, std: float) -> ActorCritic:
    """The policy with its value function, if any; `mean`, `std`: of the reference's shaped scores."""
    policy, device = setup.policy, setup.policy.device
    if config.critic is None:
        return ActorCritic(policy)
    if config.critic == "features":
        size = int(setup.reference.model.config.get_text_config().hidden_size)
        size += sum(reward.hidden_size for reward in feature_rewards(setup))
        return ActorCritic(policy, critic=FeatureCritic(size, mean, std, config.run.seed).to(device))
    hidden_size = policy.model.config.get_text_config().hidden_size
    if setup.trunk is None:
        return ActorCritic(policy, HeadValue(hidden_size).to(device))
    reward = _value_start(setup)
    score = None if reward is None else reward.model.score
    head = zero_head(hidden_size) if score is None else value_head_from_reward(score, shaping.mean, shaping.std)
    value = SeparateValue(setup.trunk, head)
    if config.policy.shard:
        shard_trained(value, value.trunk.base, device, policy.dtype)
        setup.sharded.append(value)
    return ActorCritic(policy, value.to(device))


def value_trunk(setup: Setup) -> Trunk:
    """A separate value function without its head, in float32: see `_value_start`."""
    reward = _value_start(setup)
    model = copy.deepcopy((setup.policy if reward is None else reward).model)
    trunk = (model.unload() if has_adapter(model) else model).base_model.float()
    for parameter in trunk.parameters():
        parameter.requires_grad_(True)
    return Trunk(trunk, setup.policy.dtype)


def _value_start(setup: Setup) -> RewardModel | None:
    """The reward model that a separate value function starts from: one that reads the policy's tokens, else none."""
    reward = setup.scorers.model
    fits = reward is not None and _reads_rows_of(setup, reward) and reward.model.score.out_features == 1
    return reward if fits else None


def feature_rewards(setup: Setup) -> list[RewardModel]:
    """The reward models that can read the policy's tokens."""
    return [model for model in setup.scorers.trained.models.values() if _reads_rows_of(setup, model)]


def _reads_rows_of(setup: Setup, reward: RewardModel) -> bool:
    """Whether it can read prompts and responses as the policy's tokens, whole; an encoder's states see later tokens."""
    if reward.encoder or reward.tokenizer.get_vocab() != setup.tokenizer.get_vocab():
        return False
    # A policy can draw ids that its tokenizer lacks.
    if reward.model.get_input_embeddings().num_embeddings < setup.policy.model.config.get_text_config().vocab_size:
        return False
    return reward.limit is None or setup.prompts.longest + setup.sampling.max_new_tokens <= reward.limit


def frozen_models(setup: Setup) -> list[Any]:
    """The models that are only read, without the policy: an adapter's reference is the policy."""
    frozen = [setup.reference.model, *(reward.model for reward in setup.scorers.models.values())]
    return [each for each in frozen if each is not setup.policy.model]


def build_trainer(
    config: TrainConfig,
    setup: Setup,
    scores: ReferenceScores,
    shaping: ScoreShaping,
    coef: float,
    clock: Clock,
    ranks: Ranks,
) -> PPOTrainer:
    """The trainer with its parts. `coef`: the starting beta."""
    model = build_value(config, setup, shaping, scores.mean, scores.spread or 1.0)
    reference = ReferenceStates(setup.reference)
    features = StateFeatures(model.critic, feature_rewards(setup)) if model.critic is not None else None
    rollouts = Rollouts(
        model,
        reference,
        setup.scorers,
        shaping,
        setup.prompts,
        setup.sampling,
        setup.tokenizer,
        sampler=setup.engine,
        features=features,
        ranks=ranks,
        sharded=setup.sharded,
        clock=clock,
    )
    policy, ppo = model.policy.module, config.ppo
    rate = learning_rate(config, policy)
    optimizer = adamw(policy, rate, ppo.weight_decay, model.critic, ppo.critic_learning_rate, value=model.value)
    controller = configured_controller(config, coef)
    start = Mean(scores.mean, scores.mean_stderr)
    way = way_from(setup.reference, model.policy, began_there=setup.reference_is_initial_policy)
    return PPOTrainer(config, model, optimizer, rollouts, reference, controller, features, start, way)


def learning_rate(config: TrainConfig, policy: Any) -> float:
    """The peak learning rate of a config, or for `auto` the one that fits the policy's size."""
    written = config.ppo.learning_rate
    if not isinstance(written, str):
        return written
    return usual_learning_rate(parameter_count(policy), adapter=has_adapter(policy))


def fingerprints(setup: Setup) -> dict[str, str]:
    """Fingerprints of content that a resumed run needs unchanged, by config key."""
    read = setup.scorers.columns_of(setup.prompts.table)
    columns = [repr(value) for column in read for values in column.values() for value in values]
    prints = {
        "reference.model": model_fingerprint(setup.reference),
        "the tokenizer of policy.model": tokenizer_fingerprint(setup.tokenizer),
        "data.prompts": texts_fingerprint([*setup.prompts.table.texts, *columns]),
    }
    if not setup.reference_is_initial_policy:
        prints["policy.model"] = model_fingerprint(setup.policy.module)
    if setup.scorers.model is not None:
        prints["reward.model"] = model_fingerprint(setup.scorers.model.model)
    return prints
