"""From the models and data of a run to the PPO trainer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rlhf_kl.clock import Clock
from rlhf_kl.config.named import configured_controller
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.pretrained import parameter_count
from rlhf_kl.models.value import (
    ActorCritic,
    FeatureCritic,
    HeadValue,
    SeparateValue,
    value_head_from_reward,
    zero_head,
)
from rlhf_kl.ops.masked import Mean
from rlhf_kl.ops.packing import idle_pass
from rlhf_kl.optim import adamw, usual_learning_rate
from rlhf_kl.ppo.origin import way_from
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.settings import PPOSettings
from rlhf_kl.ppo.states import ReferenceStates, StateFeatures
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.sharding import shard_trained
from rlhf_kl.training.setup import Setup, feature_rewards, value_start


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
    features = StateFeatures(model.critic, feature_rewards(setup)) if model.critic is not None else None
    rollouts = Rollouts(setup, model, ReferenceStates(setup.reference), shaping, features, ranks, clock)
    policy, ppo = model.policy.module, config.ppo
    rate = learning_rate(config, policy)
    optimizer = adamw(policy, rate, ppo.weight_decay, model.critic, ppo.critic_learning_rate, value=model.value)
    start = Mean(scores.mean, scores.mean_stderr)
    way = way_from(setup.reference, model.policy, began_there=setup.reference_is_initial_policy)
    return PPOTrainer(ppo_settings(config), rollouts, optimizer, configured_controller(config, coef), start, way)


def ppo_settings(config: TrainConfig) -> PPOSettings:
    """What PPO is told of a config; a setting that has the name of a key in `ppo` is that key's value."""
    kl, rollout = config.kl, config.rollout
    names = {field.name for field in fields(PPOSettings)}
    settings = config.ppo.model_dump(include=names) | {
        "seed": config.run.seed,
        "updates": config.updates,
        "dtype": config.run.dtype,
        "recomputes": config.policy.gradient_checkpointing,
        "batch_size": rollout.batch_size,
        "group": rollout.samples_per_prompt,
        "temperature": rollout.temperature,
        "engine": rollout.engine is not None,
        "unit": kl.unit,
        "target": kl.target_value,
        "ceiling": kl.ceiling_value,
        "backtracks": kl.ceiling is not None and kl.ceiling.action == "backtrack",
        "estimator": kl.estimator,
        "placement": kl.placement,
        "critic": config.critic,
        "critic_lam": config.critic_lam,
        "minibatch_size": config.minibatch_size,
        "rows_together": config.rows_together,
    }
    return PPOSettings(**settings)


def learning_rate(config: TrainConfig, policy: Any) -> float:
    """The peak learning rate of a config, or for `auto` the one that fits the policy's size."""
    written = config.ppo.learning_rate
    if not isinstance(written, str):
        return written
    return usual_learning_rate(parameter_count(policy), adapter=has_adapter(policy))


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
    reward = value_start(setup)
    score = None if reward is None else reward.model.score
    head = zero_head(hidden_size) if score is None else value_head_from_reward(score, shaping.mean, shaping.std)
    value = SeparateValue(setup.trunk, head)
    if config.policy.shard:
        shard_trained(value, value.trunk.base, device, policy.dtype, idle_pass(device))
    return ActorCritic(policy, value.to(device))
