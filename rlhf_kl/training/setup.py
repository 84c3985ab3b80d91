"""Builds the models and data of a run from its config, and refuses what cannot work."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_kl.config.named import scorers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.prepare import prepare_prompts
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import PromptRow
from rlhf_kl.errors import InputError, blame
from rlhf_kl.models.engine import VLLM
from rlhf_kl.models.lm import LM, Trunk
from rlhf_kl.models.lora import AdapterReference, adapter_base, blame_base, has_adapter
from rlhf_kl.models.pretrained import (
    check_vocabulary,
    context_length,
    eos_ids,
    model_fingerprint,
    texts_fingerprint,
    tokenizer_fingerprint,
)
from rlhf_kl.models.tokens import encode_all
from rlhf_kl.models.value import store_frozen
from rlhf_kl.ppo.origin import same_weights
from rlhf_kl.ppo.rollout import RolloutParts
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.training import sets
from rlhf_kl.training.load import Loaded, Loader, check_reference
from rlhf_kl.training.resolved import Resolved, decided_chat, with_chat
from rlhf_kl.types import Prompts, Sampling
from rlhf_kl.ui import log

NO_PROMPTS = Prompts([], [], [], [])


@dataclass(kw_only=True)
class Setup(RolloutParts):
    """The models and data of a run."""

    policy: LM
    tokenizer: Any
    reference: LM
    reference_is_initial_policy: bool
    scorers: Scorers
    prompts: PromptStream
    heldout: PromptStream
    texts: list[str]
    sampling: Sampling
    trunk: Trunk | None = None  # of a separate value function
    fingerprints: dict[str, str] = field(default_factory=dict)  # of what a resumed run needs unchanged, by config key


def build_setup(resolved: Resolved, device: torch.device) -> Setup:
    """Load everything that the config names, and refuse what cannot work.

    Models come to the device in the types in which they stay there; those that are to be sharded stay on the CPU, see
    `shard_models`.
    """
    config = resolved.config
    loader = Loader(config.run, mapped=config.policy.shard)
    frozen = Loader(config.run, mapped=config.reference.shard, given=resolved.given)
    loaded = loader.trained_model(config.policy.model, config.policy, config.run.seed)
    policy, tokenizer = LM(loaded.model, loader.dtype), loaded.tokenizer
    prompted = [row.text for row in resolved.rows[0]]
    reference, is_initial_policy = build_reference(config, frozen, loaded, prompted)
    scorers = frozen.scorers(scorers_of(config), config.reward.time_limit, config.data.system)
    prompts, heldout = build_streams(config, resolved.rows, policy.model, tokenizer)
    scorers.trained.columns_of(prompts.table)
    scorers.columns_of(heldout.table)
    with blame("eval.texts"):
        check_vocabulary(policy.model, tokenizer, encode_all(tokenizer, resolved.texts))
    scorers.begin(1, config.updates)
    sampling = sampling_of(config, policy.model, tokenizer)
    setup = Setup(
        policy=policy,
        tokenizer=tokenizer,
        reference=reference,
        reference_is_initial_policy=is_initial_policy,
        scorers=scorers,
        together=scorers.trained.together,
        prompts=prompts,
        heldout=heldout,
        texts=resolved.texts,
        sampling=sampling,
    )
    setup.trunk = value_trunk(setup) if config.critic == "separate" else None
    setup.fingerprints = fingerprints(setup, config)
    place_models(config, setup, device)
    return setup


def build_streams(
    config: TrainConfig, rows: Sequence[list[PromptRow]], policy: Any, tokenizer: Any
) -> tuple[PromptStream, PromptStream]:
    """The prompts to train on, and the held-out ones; without rows both come later."""
    if not rows[0]:
        return streams(config, NO_PROMPTS, NO_PROMPTS, longest=prompt_room(config, policy))
    return streams(config, *build_prompts(config, rows, policy, tokenizer))


def streams(
    config: TrainConfig, train: Prompts, kept: Prompts, longest: int | None = None
) -> tuple[PromptStream, PromptStream]:
    """Prompts to train on and held-out ones in the order of the run. `longest`: of prompts that come later."""
    batch, seed = config.rollout.batch_size, config.run.seed
    heldout = PromptStream(kept, config.eval.most_responses, seed)  # few prompts: each is answered more than once
    return PromptStream(train, batch, seed, config.rollout.samples_per_prompt, longest), heldout


def prompt_room(config: TrainConfig, policy: Any) -> int | None:
    """Tokens of a prompt that fit into the context beside the response; None = no limit.

    Errors: InputError where nothing is left.
    """
    context, new = context_length(policy), config.rollout.max_new_tokens
    if context is not None and new >= context:
        raise InputError(f"rollout.max_new_tokens: {new} + a prompt > {context}, the model's context: lower it")
    return None if context is None else context - new


def start_engine(config: TrainConfig, setup: Setup) -> None:
    """Start what draws the responses in place of the models, if the config names something; all processes together.

    Errors: InputError for options that it refuses.
    """
    if config.rollout.engine is not None:
        longest = setup.prompts.longest + setup.sampling.max_new_tokens
        setup.engine = VLLM(setup.policy, longest, config.rollout.engine_options)


def place_models(config: TrainConfig, setup: Setup, device: torch.device) -> None:
    """Store frozen layers in the type that they compute in, then move all to the device; not what will be sharded."""
    value = [] if setup.trunk is None else [setup.trunk]
    whole = [] if config.policy.shard else [setup.policy.model, *value]
    for each in [*whole, *([] if config.reference.shard else frozen_models(setup))]:
        if each not in value:
            store_frozen(each, setup.policy.dtype)
        each.to(device)


def sampling_of(config: TrainConfig, model: Any, tokenizer: Any) -> Sampling:
    """The sampling settings of a run."""
    return Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        eos_ids=eos_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )


def build_reference(config: TrainConfig, loader: Loader, loaded: Loaded, texts: Sequence[str] = ()) -> tuple[LM, bool]:
    """The frozen model that the KL is measured to (of an adapter no copy), and whether the policy starts as it.

    `texts`: prompts of the run, which both have to read alike.
    """
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
    found = loader.language_model(ref, "reference.model")
    reference = found.model
    with blame("reference.model"):
        check_reference(policy, loaded.tokenizer, reference, found.tokenizer, texts)
    # A copy under another name is the start too. An adapter is none: it begins as what it is added to.
    return loader.frozen(reference), not has_adapter(policy) and same_weights(policy, reference)


def build_prompts(
    config: TrainConfig, read: Sequence[list[PromptRow]], policy: Any, tokenizer: Any
) -> tuple[Prompts, Prompts]:
    """Prompts to train on and held-out ones, as tokens that fit into the context beside the response."""
    room = prompt_room(config, policy)
    train_rows, kept_rows = read
    form = with_chat(config, decided_chat(config.data, train_rows, tokenizer)).data
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


def trained_on(train: Prompts, kept: Prompts) -> bool:
    """Whether the evaluation's prompts are those of the training, which were too few to hold some out."""
    return bool(kept.texts) and set(kept.texts) <= set(train.texts)


def usable_prompts(
    key: str, rows: Sequence[PromptRow], policy: Any, tokenizer: Any, room: int | None, form: PromptsSection
) -> Prompts:
    """The prompts under `key` that have at most `room` tokens. Errors: InputError if there is none."""
    with blame(key):
        prompts, left_out = prepare_prompts(
            rows,
            tokenizer,
            room,
            chat=decided_chat(form, rows, tokenizer),
            system=form.system,
            options=form.chat_options,
            first_tokens=form.first_tokens,
        )
        check_vocabulary(policy, tokenizer, prompts.ids)
    if left_out:
        log.info(f"{key}: {left_out}")
    return prompts


def value_trunk(setup: Setup) -> Trunk:
    """A separate value function without its head, in float32: see `value_start`."""
    reward = value_start(setup)
    model = copy.deepcopy((setup.policy if reward is None else reward).model)
    trunk = (model.unload() if has_adapter(model) else model).base_model.float()
    for parameter in trunk.parameters():
        parameter.requires_grad_(True)
    return Trunk(trunk, setup.policy.dtype)


def value_start(setup: Setup) -> RewardModel | None:
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


def fingerprints(setup: Setup, config: TrainConfig) -> dict[str, str]:
    """Fingerprints of content that a resumed run needs unchanged, by config key."""
    read = setup.scorers.trained.columns_of(setup.prompts.table)
    columns = [repr(value) for column in read for values in column.values() for value in values]
    prints = {
        "reference.model": model_fingerprint(setup.reference),
        "the tokenizer of policy.model": tokenizer_fingerprint(setup.tokenizer),
        "data.prompts": texts_fingerprint([*setup.prompts.table.texts, *columns]),
    }
    if not setup.reference_is_initial_policy:
        prints["policy.model"] = model_fingerprint(setup.policy.module)
    named = scorers_of(config)
    for scorer in setup.scorers.scorers:
        if (model := setup.scorers.models.get(scorer.name)) is not None:
            other = f" ({named[scorer.key].model})" * scorer.never_trains  # which may give way to another
            prints[f"{scorer.key}.model{other}"] = model_fingerprint(model.model)
    return prints
