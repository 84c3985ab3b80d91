"""How much memory an update takes, by counting; good to about a third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_kl.commands.parts import Parts, feature_count
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.activations import kept_per_token, tokens_of_a_pass
from rlhf_kl.models.load import parameter_count
from rlhf_kl.models.logits import LOGIT_ELEMENTS
from rlhf_kl.models.lora import has_adapter

FLOAT = 4  # bytes
LOGIT_COPIES = 3  # logits, their float32 log-softmax, its gradient
SHARE = 0.85  # of the free memory that may be planned with


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of an update."""

    models: int  # weights of all models, gradients, Adam's moments, the copy that the ceiling goes back to
    states: int  # hidden states of a rollout that are kept through its update
    per_row: int  # activations of one response in a training pass
    logits: int  # of one response; a chunk holds at most `chunk`
    chunk: int
    cache: int  # keys and values of a rollout batch

    def total(self, rows: int) -> int:
        """With `rows` responses in a training pass; sampling and training do not stand side by side."""
        training = rows * self.per_row + min(rows * self.logits, self.chunk)
        return self.models + self.states + max(training, self.cache)


def estimate_memory(config: TrainConfig, parts: Parts, tokens: int) -> MemoryEstimate:
    """For responses of `tokens` tokens, their prompts included."""
    policy: Any = parts.policy.model
    shape = policy.config.get_text_config()
    size = 2 if config.run.dtype == "bfloat16" else FLOAT
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    weights = parameter_count(policy)
    value = 0
    if config.critic == "separate":
        value = parameter_count(policy)
        trained += value
    reference = 0 if has_adapter(policy) else parameter_count(parts.reference.module)
    scorers = sum(parameter_count(model) for model in _scoring_models(parts))
    copies = 3 + (config.kl.ceiling is not None)  # gradients, two moments, what a shortened update goes back to
    models = FLOAT * (weights + value + reference + scorers + copies * trained)
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    response = min(config.rollout.max_new_tokens, tokens)
    kept = _models(config) * kept_per_token(policy)
    copies_of_logits = LOGIT_COPIES * FLOAT
    elements = LOGIT_ELEMENTS.get(parts.policy.device.type, LOGIT_ELEMENTS["cpu"])
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = heads * (getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads)
    cache = config.rollout.batch_size * tokens * layers * 2 * width * size
    features = feature_count(parts) if config.critic == "features" else 0
    return MemoryEstimate(
        models=models,
        states=config.rollout.batch_size * response * (hidden + features) * FLOAT,
        per_row=tokens * kept * size,
        logits=response * int(shape.vocab_size) * copies_of_logits,
        chunk=elements * copies_of_logits,
        cache=cache,
    )


def _scoring_models(parts: Any) -> list[Any]:
    reward = parts.reward
    rewards = [term for _, term in reward.terms.values()] if hasattr(reward, "terms") else [reward]
    return [scorer.model for scorer in (*rewards, parts.gold) if hasattr(scorer, "model")]


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device, those that this process holds included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    import psutil

    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def microbatch_rows(config: TrainConfig, policy: Any, device: torch.device, tokens: int) -> int:
    """Responses in a training pass, where each has `tokens` tokens with its prompt."""
    if config.ppo.microbatch_size is not None:
        return config.ppo.microbatch_size
    room = tokens_of_a_pass(policy, device, config.run.dtype, models=_models(config))
    return max(1, min(config.minibatch_size, room // tokens))


def _models(config: TrainConfig) -> int:
    """Models that a training pass goes through; a separate value function is about as large as the policy."""
    return 2 if config.critic == "separate" else 1


def largest_microbatch(estimate: MemoryEstimate, minibatch: int, room: int) -> int | None:
    """The largest divisor of the minibatch that fits into `room` bytes; None where not even 1 does."""
    fitting = [n for n in range(1, minibatch + 1) if minibatch % n == 0 and estimate.total(n) <= room]
    return max(fitting, default=None)
