"""An estimate of an update's memory, by counting; good to about a third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlhf_kl.commands.build import Setup, feature_count, layers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.memory import kept_per_token, tokens_of_a_pass
from rlhf_kl.models.load import parameter_count
from rlhf_kl.models.logits import LOGIT_ELEMENTS
from rlhf_kl.models.lora import has_adapter

FLOAT = 4  # bytes
LOGIT_COPIES = 3  # logits, their float32 log-softmax, its gradient
SHARE = 0.85  # usable share of the free memory


@dataclass(frozen=True)
class Weights:
    """Numbers in the models of a run."""

    policy: int
    trained: int  # of the policy and of a separate value function
    frozen: int  # the reference and reward models
    value: int = 0  # a separate value function
    outside: int = 0  # of the policy, outside of its layers: embeddings and head
    frozen_outside: int = 0
    layer: int = 0  # the largest layer


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of an update in one process."""

    kept: int  # weights, Adam's moments
    training: int  # gradients, the ceiling's copy of the weights, layers gathered for a pass
    gathered: int  # the parts of sharded models that other processes hold
    states: int  # hidden states of a rollout that are kept through its update
    per_row: int  # activations of one response in a training pass
    logits: int  # of one response; a chunk holds at most `chunk`
    chunk: int
    cache: int  # keys and values of a rollout's rows

    def total(self, rows: int) -> int:
        """With `rows` responses in a training pass; sampling and training never happen at the same time."""
        training = self.training + rows * self.per_row + min(rows * self.logits, self.chunk)
        return self.kept + self.states + max(training, self.gathered + self.cache)


def weight_bytes(
    weights: Weights, processes: int, *, shard: bool, shard_frozen: bool, copies: int, cast: float = 0.0
) -> tuple[int, int, int]:
    """`kept`, `training` and `gathered` of `MemoryEstimate`.

    Of a sharded policy each process holds one part in `processes`: weights, gradient, moments and the `copies` of the
    ceiling. A pass gathers two layers and the weights outside of layers, and has the gradients of one layer; a rollout
    gathers all. Of sharded frozen models only the layers are divided. `cast`: size of autocast's copy over that of the
    weight; a pass keeps the copies of all layers for its backward pass, a rollout those of the trained layers.
    """
    part = 1 / processes if shard else 1.0
    layers = weights.frozen - weights.frozen_outside
    frozen = weights.frozen_outside + layers / processes if shard_frozen else weights.frozen
    full = weights.policy + weights.value
    learns = weights.trained / full
    kept = full * part + frozen + 2 * weights.trained * part
    training = (1 + copies) * weights.trained * part
    if shard:
        training += 2 * weights.layer + weights.outside + learns * (weights.layer + weights.outside)
    training += cast * (full - weights.outside)
    gathered = full * (1 - part) + (weights.frozen - frozen) + cast * max(0, weights.trained - weights.outside)
    return int(FLOAT * kept), int(FLOAT * training), int(FLOAT * gathered)


def estimate_memory(config: TrainConfig, setup: Setup, tokens: int, processes: int = 1) -> MemoryEstimate:
    """For responses of `tokens` tokens, their prompts included."""
    policy: Any = setup.policy.model
    shape = policy.config.get_text_config()
    size = 2 if config.run.dtype == "bfloat16" else FLOAT
    weights = _weights(config, setup)
    kept, training, gathered = weight_bytes(
        weights,
        processes,
        shard=config.policy.shard,
        shard_frozen=config.reference.shard,
        copies=int(config.kl.ceiling is not None),
        cast=0.5 if size < FLOAT and not config.policy.gradient_checkpointing else 0.0,
    )
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    response = min(config.rollout.max_new_tokens, tokens)
    per_token = _models(config) * kept_per_token(policy)
    copies_of_logits = LOGIT_COPIES * FLOAT
    elements = LOGIT_ELEMENTS.get(setup.policy.device.type, LOGIT_ELEMENTS["cpu"])
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = heads * (getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads)
    rows = -(-config.rollout.batch_size // processes)
    features = feature_count(setup) if config.critic == "features" else 0
    return MemoryEstimate(
        kept=kept,
        training=training,
        gathered=gathered,
        states=rows * response * (hidden + features) * FLOAT,
        per_row=tokens * per_token * size,
        logits=response * int(shape.vocab_size) * copies_of_logits,
        chunk=elements * copies_of_logits,
        cache=rows * tokens * layers * 2 * width * size,
    )


def _weights(config: TrainConfig, setup: Setup) -> Weights:
    policy: Any = setup.policy.model
    adapted = has_adapter(policy)
    value = parameter_count(policy) if config.critic == "separate" else 0
    rewards = [reward.model for reward in setup.scorers.models.values()]
    frozen = [*([] if adapted else [setup.reference.module]), *rewards]
    layers = layers_of(policy.get_base_model() if adapted else policy)
    return Weights(
        policy=parameter_count(policy),
        trained=sum(p.numel() for p in policy.parameters() if p.requires_grad) + value,
        value=value,
        frozen=sum(map(parameter_count, frozen)),
        outside=parameter_count(policy) - sum(map(parameter_count, layers)),
        frozen_outside=sum(parameter_count(m) - sum(map(parameter_count, layers_of(m))) for m in frozen),
        layer=max(map(parameter_count, layers), default=0),
    )


def free_memory(device: torch.device) -> int:
    """Free bytes on the device, with those that this process holds."""
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
    """The largest divisor of the minibatch that fits into `room` bytes; None if 1 does not fit."""
    fitting = [n for n in range(1, minibatch + 1) if minibatch % n == 0 and estimate.total(n) <= room]
    return max(fitting, default=None)
