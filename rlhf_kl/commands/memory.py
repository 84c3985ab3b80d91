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

    def largest_microbatch(self, minibatch: int, room: int) -> int | None:
        """The largest divisor of the minibatch that fits into `room` bytes; None if 1 does not fit."""
        fitting = [n for n in range(1, minibatch + 1) if minibatch % n == 0 and self.total(n) <= room]
        return max(fitting, default=None)


def estimate_memory(config: TrainConfig, setup: Setup, tokens: int, processes: int = 1) -> MemoryEstimate:
    """For responses of `tokens` tokens, their prompts included.

    Of a sharded policy each process holds one part in `processes`: weights, gradients, Adam's moments and the copy for
    the ceiling. A training pass gathers two layers and the weights outside of layers, and has the gradients of one
    layer; a rollout gathers all. Of sharded frozen models only the layers are divided.
    """
    policy: Any = setup.policy.model
    shape = policy.config.get_text_config()
    size = 2 if config.run.dtype == "bfloat16" else FLOAT
    adapted, shard = has_adapter(policy), config.policy.shard

    # Numbers of the models.
    value = parameter_count(policy) if config.critic == "separate" else 0
    full = parameter_count(policy) + value
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad) + value
    layer_sizes = [parameter_count(layer) for layer in layers_of(policy.get_base_model() if adapted else policy)]
    layer, outside = max(layer_sizes, default=0), parameter_count(policy) - sum(layer_sizes)
    frozen_models = [*([] if adapted else [setup.reference.module]), *(r.model for r in setup.scorers.models.values())]
    all_frozen = frozen = sum(map(stored_bytes, frozen_models)) / FLOAT  # in numbers of 4 bytes
    if config.reference.shard:
        in_layers = sum(parameter_count(layer) for model in frozen_models for layer in layers_of(model))
        frozen = all_frozen - in_layers * (1 - 1 / processes)

    part = 1 / processes if shard else 1.0
    training = (2 if config.kl.ceiling is not None else 1) * trained * part
    if shard:
        training += 2 * layer + outside + trained / full * (layer + outside)
    gathered = full * (1 - part) + all_frozen - frozen
    own = stored_bytes(policy) / FLOAT + value
    if size < FLOAT and not config.policy.gradient_checkpointing:
        # Autocast's copies, half as large: of all float32 layers for the backward pass, in a rollout of trained ones.
        training += 0.5 * (full - outside - 2 * (full - own))
        gathered += 0.5 * max(0, trained - outside)

    response = min(config.rollout.max_new_tokens, tokens)
    rows = -(-config.rollout.batch_size // processes)
    features = feature_count(setup) if config.critic == "features" else 0
    hidden = int(shape.hidden_size)
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = heads * (getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads)
    elements = LOGIT_ELEMENTS.get(setup.policy.device.type, LOGIT_ELEMENTS["cpu"])
    return MemoryEstimate(
        kept=int(FLOAT * (own * part + frozen + 2 * trained * part)),
        training=int(FLOAT * training),
        gathered=int(FLOAT * gathered),
        states=rows * response * (hidden + features) * FLOAT,
        per_row=tokens * _models(config) * kept_per_token(policy) * size,
        logits=response * int(shape.vocab_size) * LOGIT_COPIES * FLOAT,
        chunk=elements * LOGIT_COPIES * FLOAT,
        cache=rows * tokens * int(shape.num_hidden_layers) * 2 * width * size,
    )


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters: frozen layers may be stored in bfloat16."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


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
