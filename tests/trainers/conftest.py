from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Make = Callable[..., Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {"batch_size": 32, "max_new_tokens": 8},
    "ppo": {
        "total_episodes": 640,
        "minibatch_size": 16,
        "microbatch_size": 8,
        "epochs": 2,
        "learning_rate": 3e-3,
        "lr_schedule": "constant",
    },
    "kl": {"ceiling": None, "controller": {"kind": "fixed", "coef": 0.05}},
    "reward": {"missing_eos_penalty": 0.0},
}


def count_a(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The task: as many letters a as possible."""
    return [float(response.count("a")) for response in responses]


@pytest.fixture
def make_trainer(new_model: Make, letters: Any) -> Make:
    """`make_trainer(ppo={...}, kl={...}, ...)`: a PPO trainer of a seven-letter model, nothing on disk."""
    from accelerate import Accelerator

    from rlhf_kl.commands.train import build_control
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.data.prompts import PromptStream
    from rlhf_kl.models.actor_critic import ActorCritic, freeze
    from rlhf_kl.reward_functions import ScoreShaping
    from rlhf_kl.rollout.collect import Sampling
    from rlhf_kl.trainers.optim import adamw
    from rlhf_kl.trainers.ppo import PPOTrainer

    def make(
        *,
        policy: Any = None,
        reference: Any = None,
        value_trunk: Any = None,
        critic: Any = None,
        optimizer: Callable[[Any], Any] | None = None,
        controller: Any = None,
        reward: Any = count_a,
        shaping: ScoreShaping | None = None,
        **sections: dict[str, Any],
    ) -> PPOTrainer:
        settings = copy.deepcopy(SETTINGS)
        for name, values in sections.items():
            settings[name] = settings.get(name, {}) | values
        config = TrainConfig.model_validate(settings)
        policy = policy if policy is not None else new_model(seed=3, spread=0.1)
        model = ActorCritic(policy, value_trunk, critic=critic)
        return PPOTrainer(
            config=config,
            accelerator=Accelerator(cpu=True),
            model=model,
            optimizer=optimizer(model)
            if optimizer
            else adamw(model, config.ppo.learning_rate, 0.0, critic, config.ppo.critic_learning_rate),
            reference=freeze(copy.deepcopy(policy) if reference is None else reference),
            reward=reward,
            shaping=shaping or ScoreShaping(mean=1.0, std=1.0),
            controller=controller or build_control(config, 0.05),
            prompts=PromptStream(["a", "ab", "cd", "dcba", "bbb"], letters, config.rollout.batch_size, 0),
            tokenizer=letters,
            sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature, [2], 0),
        )

    return make
