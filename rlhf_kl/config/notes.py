"""Notes at the start of a run about valid settings that may not do what the user intends."""

from __future__ import annotations

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.config.schema import PPOSection, TrainConfig


def gradient_notes(config: TrainConfig) -> list[str]:
    """Choices whose gradient is not that of KL(policy || reference)."""
    kl = config.kl
    if kl.controller.coef == 0:
        return []
    notes = []
    if kl.estimator == "importance":
        notes.append("kl.estimator importance: it overestimates the KL on samples of the policy itself")
    if kl.placement == "reward" and kl.estimator == "exact":
        notes.append(
            "kl.estimator exact in the reward: the current token's own KL is only a baseline there; "
            "rao_blackwell has the true gradient"
        )
    if kl.placement == "reward" and kl.estimator in ("k2", "k3"):
        notes.append(f"kl.estimator {kl.estimator} in the reward: not the gradient of KL(policy || reference); k1 is")
    if kl.placement == "loss" and kl.estimator == "k1":
        notes.append("kl.estimator k1 in the loss: its expected gradient is zero, so it does not limit the KL")
    if kl.placement == "loss" and kl.estimator == "k3":
        notes.append("kl.estimator k3 in the loss: has the gradient of KL(reference || policy), the other direction")
    return [f"kl-gradient: {note}" for note in notes]


def unused_notes(config: TrainConfig) -> list[str]:
    """Settings of a kind of value function or advantage that the run does not have."""
    if config.ppo.advantage != "grpo" and not config.ppo.scale_by_group_std:
        return [f"ppo.scale_by_group_std is not used: ppo.advantage is {config.ppo.advantage}", *_unused_critic(config)]
    return _unused_critic(config)


def _unused_critic(config: TrainConfig) -> list[str]:
    defaults = PPOSection()
    if config.critic is None:
        unused = ("lam", "critic_lam", "critic_epochs", "critic_learning_rate", "cliprange_value", "vf_coef")
        written = [f"ppo.{name}" for name in unused if getattr(config.ppo, name) != getattr(defaults, name)]
        written += ["policy.value"] if "value" in config.policy.model_fields_set else []
        return [f"{name} is not used: ppo.advantage is {config.ppo.advantage}, without a critic" for name in written]
    features = config.policy.value == "features"
    names = ("vf_coef", "cliprange_value") if features else ("critic_epochs", "critic_learning_rate")
    return [
        f"ppo.{name} is not used: policy.value is {config.policy.value}"
        for name in names
        if getattr(config.ppo, name) != getattr(defaults, name)
    ]


def world_notes(config: TrainConfig) -> list[str]:
    """Parts of the built-in world that are set although the policy is not part of it."""
    if is_builtin(config.policy.model):
        return []
    parts = {"reward.model": config.reward.model, "data.prompts": config.data.prompts, "eval.texts": config.eval.texts}
    return [
        f"{key} {ref}: part of the built-in world, but policy.model is not"
        for key, ref in parts.items()
        if is_builtin(ref)
    ]


def start_notes(config: TrainConfig) -> list[str]:
    """All notes on a config."""
    return [*gradient_notes(config), *unused_notes(config), *world_notes(config)]
