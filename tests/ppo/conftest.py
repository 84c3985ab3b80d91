from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.made import Make

SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {"batch_size": 32, "max_new_tokens": 8},
    "ppo": {
        "total_episodes": 640,
        "epochs": 2,
        "minibatch_size": 16,
        "microbatch_size": 8,
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
def make_trainer(new_model: Make, letters: Any, prompts_of: Make) -> Make:
    """`make_trainer(ppo={...}, kl={...}, ...)`: a PPO trainer of a seven-letter model, nothing on disk.

    `policy`, `reference` and `trunk` (of a separate value function) are models of transformers, `critic` a
    `FeatureCritic`; without the last two the value function is a head. `optimizer(modules)` makes another one.
    A `reference` may be an `AdapterReference`. `began_there`: the policy began as it; default: where none is given.
    """
    from rlhf_kl.config.named import configured_controller
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.data.prompts import PromptStream
    from rlhf_kl.models.lm import LM, Trunk
    from rlhf_kl.models.pretrained import compute_dtype
    from rlhf_kl.models.value import ActorCritic, HeadValue, SeparateValue, frozen_lm, zero_head
    from rlhf_kl.optim import adamw
    from rlhf_kl.ppo.origin import way_from
    from rlhf_kl.ppo.rollout import RolloutParts, Rollouts
    from rlhf_kl.ppo.states import ReferenceStates, StateFeatures
    from rlhf_kl.ppo.step import PPOTrainer
    from rlhf_kl.rewards.plugin import PluginReward
    from rlhf_kl.rewards.scorer import Scorer, Scorers
    from rlhf_kl.rewards.shaping import ScoreShaping
    from rlhf_kl.training.trainer import ppo_settings
    from rlhf_kl.types import Sampling

    def make(
        *,
        policy: Any = None,
        reference: Any = None,
        trunk: Any = None,
        critic: Any = None,
        optimizer: Callable[[Any], Any] | None = None,
        controller: Any = None,
        reward: Any = count_a,
        shaping: ScoreShaping | None = None,
        began_there: bool | None = None,
        **sections: dict[str, Any],
    ) -> PPOTrainer:
        settings = copy.deepcopy(SETTINGS)
        for name, values in sections.items():
            settings[name] = settings.get(name, {}) | values
        settings["policy"] = {
            "value": "separate" if trunk is not None else "features" if critic is not None else "head"
        }
        config = TrainConfig.model_validate(settings)
        policy = policy if policy is not None else new_model(seed=3, spread=0.1)
        dtype = compute_dtype(config.run.dtype)
        lm, size = LM(policy, dtype), policy.config.hidden_size
        began_there = reference is None if began_there is None else began_there
        reference = copy.deepcopy(policy) if reference is None else reference
        other = reference if isinstance(reference, LM) else frozen_lm(reference, dtype, lm.device)
        if trunk is not None:
            model = ActorCritic(lm, SeparateValue(Trunk(trunk, dtype), zero_head(size)))
        else:
            model = ActorCritic(lm, critic=critic) if critic is not None else ActorCritic(lm, HeadValue(size))
        states = ReferenceStates(other)
        features = StateFeatures(critic) if critic is not None else None
        scorers, size = Scorers(Scorer("reward", PluginReward(reward))), config.rollout.batch_size
        group = config.rollout.samples_per_prompt
        prompts = PromptStream(prompts_of("a", "ab", "cd", "dcba", "bbb"), size, config.run.seed, group)
        sampling = Sampling(config.rollout.max_new_tokens, config.rollout.temperature, [2], 0)
        shaping = shaping or ScoreShaping(mean=1.0, std=1.0)
        rates = config.ppo.learning_rate, 0.0, critic, config.ppo.critic_learning_rate
        own = adamw(model.policy.module, *rates, value=model.value)
        parts = RolloutParts(tokenizer=letters, scorers=scorers, prompts=prompts, sampling=sampling)
        return PPOTrainer(
            ppo_settings(config),
            Rollouts(parts, model, states, shaping, features),
            optimizer(model.modules) if optimizer else own,
            controller or configured_controller(config, 0.05),
            way=way_from(other, lm, began_there=began_there),
        )

    return make
