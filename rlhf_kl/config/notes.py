"""Notes at the start of a run about valid settings that may not do what the user intends."""

from __future__ import annotations

from rlhf_kl.config.schema import PPOSection, TrainConfig

# (placement, estimator): why its gradient is not that of KL(policy || reference).
GRADIENTS = {
    ("reward", "exact"): "the current token's own KL is only a baseline there; rao_blackwell has the true gradient",
    ("reward", "k2"): "not the gradient of KL(policy || reference); k1 is",
    ("reward", "k3"): "not the gradient of KL(policy || reference); k1 is",
    ("reward", "importance"): "it overestimates the KL on samples of the policy itself",
    ("loss", "k1"): "its expected gradient is zero, so it does not limit the KL",
    ("loss", "k3"): "has the gradient of KL(reference || policy), the other direction",
    ("loss", "importance"): "it overestimates the KL on samples of the policy itself",
}


def gradient_notes(config: TrainConfig) -> list[str]:
    """Choices whose gradient is not that of KL(policy || reference)."""
    kl = config.kl
    reason = GRADIENTS.get((kl.placement, kl.estimator))
    if reason is None or kl.controller.coef == 0:
        return []
    return [
        f"kl-gradient: kl.estimator {kl.estimator} in the {kl.placement}: {reason}. Use kl.placement=reward "
        "with kl.estimator=k1, or leave both out (rlhf-kl guide kl)"
    ]


def unused_notes(config: TrainConfig) -> list[str]:
    """Settings of a kind of value function or advantage that the run does not have."""
    unread = {
        None: ("lam", "critic_lam", "critic_epochs", "critic_learning_rate", "cliprange_value", "vf_coef"),
        "features": ("vf_coef", "cliprange_value"),
    }.get(config.critic, ("critic_epochs", "critic_learning_rate"))
    if config.ppo.advantage != "grpo":
        unread += ("scale_by_group_std",)
    defaults = PPOSection()
    unused = [f"ppo.{name}" for name in unread if getattr(config.ppo, name) != getattr(defaults, name)]
    if config.critic is None and "value" in config.policy.model_fields_set:
        unused.append("policy.value")
    critic = f", policy.value is {config.critic}" if config.critic else ""
    return [f"{name} is not used: ppo.advantage is {config.ppo.advantage}{critic}" for name in unused]
