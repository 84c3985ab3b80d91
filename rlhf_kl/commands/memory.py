"""The memory of an update by counting: within 15 % of a profiler's peak (tests/commands/test_memory.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.commands.build import Setup, feature_count, layers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.memory import tokens_of_a_pass
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import parameter_count
from rlhf_kl.models.logits import LOGIT_ELEMENTS, can_shift, has_rounding_products
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.ops.logprobs import CHUNK_ELEMENTS, DEVICE_CHUNKS
from rlhf_kl.ops.packing import KEYS_AND_VALUES, WORTH_SHARING
from rlhf_kl.rewards.model import SCORING_ROWS, SCORING_TOKENS
from rlhf_kl.rollout.states import PASS_ROWS, PASS_TOKENS

FLOAT = 4  # bytes
SHARE = 0.85  # usable share of the free memory
TEMPORARIES = 6  # copies in float32 of logits that are drawn from, or of a piece that is compared
AT_ONCE = 0.75  # of what a layer keeps for its backward pass, what a pass without one holds at once


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of an update in one process."""

    kept: int  # weights, Adam's moments
    states: int  # hidden states of a rollout that are kept through its update
    rollout: int  # for sampling and reading a rollout
    training: int  # all the time while it trains: the ceiling's copy of the weights, layers that are gathered
    gradients: int
    tied: int  # the gradient of tied embeddings, of which the end of a backward pass holds one for each use
    per_pass: int  # of a pass of any size: copies of weights in bfloat16, temporaries
    per_row: int  # activations of one response in a training pass
    logits: int  # of one response, with their copies; a chunk holds at most `chunk`
    chunk: int
    minibatch: int  # responses
    rows: int  # of a training pass by the config

    def total(self, rows: int) -> int:
        """With `rows` responses in a training pass; sampling, reading and training never happen at the same time."""
        later = min(rows, self.minibatch - rows)  # in a pass that finds gradients of an earlier one
        begin = max(self.forward(rows), self.gradients + self.forward(later))
        end = self.gradients + (3 if later else 2) * self.tied
        return self.kept + self.states + max(self.rollout, self.training + max(begin, end))

    def forward(self, rows: int) -> int:
        """What a forward pass keeps of `rows` responses."""
        return self.per_pass + rows * self.per_row + min(rows * self.logits, self.chunk)

    def largest_microbatch(self, room: int) -> int | None:
        """The largest divisor of the minibatch that fits into `room` bytes; None if 1 does not fit."""
        fitting = [n for n in range(1, self.minibatch + 1) if self.minibatch % n == 0 and self.total(n) <= room]
        return max(fitting, default=None)


def estimate_memory(config: TrainConfig, setup: Setup, device: torch.device, processes: int = 1) -> MemoryEstimate:
    """For the longest prompts, and responses of full length, where a model on `device` trains.

    Of a sharded policy each process holds one part in `processes`: weights, gradients, Adam's moments and the copy for
    the ceiling. A training pass gathers two layers and the weights outside of layers, and has the gradients of one
    layer; a rollout gathers all. Of sharded frozen models only the layers are divided.
    """
    policy: Any = setup.policy.model
    shape, adapted, shard = policy.config.get_text_config(), has_adapter(policy), config.policy.shard
    hidden, depth, vocabulary = int(shape.hidden_size), int(shape.num_hidden_layers), int(shape.vocab_size)
    last, inputs = setup.policy.base.get_output_embeddings(), setup.policy.base.get_input_embeddings()
    head, half = last.weight, setup.policy.dtype == torch.bfloat16
    kind = device.type if device.type in LOGIT_ELEMENTS else "cpu"

    # Numbers of the models.
    models = 2 if config.critic == "separate" else 1  # a separate value function is about as large as the policy
    value = (models - 1) * parameter_count(policy)
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
    own = stored_bytes(policy) / FLOAT + value
    ceiling = (trained - value) * part if config.kl.ceiling is not None else 0
    centred = 0  # the head without its mean, of the reference, and of a policy whose head is frozen
    if half and can_shift(last, shape) and has_rounding_products(device):
        centred = head.numel() * (1 if head.requires_grad else 2)

    # Rows. Where a prompt is read once for its responses, the keys and values of each take a quarter of its memory.
    rows, minibatch = -(-config.rollout.batch_size // processes), config.minibatch_size // processes
    new, prompt, each = config.rollout.max_new_tokens, setup.prompts.longest, config.rollout.samples_per_prompt
    row = read = prompt + new
    together = not (shard or config.policy.gradient_checkpointing)
    if together and prompt * (1 - 1 / each) > WORTH_SHARING * (row - 1):
        read = new + prompt // each + prompt // KEYS_AND_VALUES
    in_pass = config.ppo.microbatch_size or tokens_of_a_pass(policy, device, config.run.dtype, models=models) // read
    states = new * hidden
    if config.critic == "features":  # of whole texts those that scored them, in the critic's features again
        states += new * feature_count(setup) + row * (feature_count(setup) - hidden)

    # Bytes of passes.
    weights, per_token = kept_by_autograd(setup.policy)
    logits, chunk = FLOAT * new * vocabulary, FLOAT * LOGIT_ELEMENTS[kind]
    if rows * logits <= chunk:
        states += new * vocabulary  # the reference's logits are kept too
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_size = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    cached = (2 if half else FLOAT) * 2 * depth * heads * head_size  # of a token
    at_once = AT_ONCE * per_token / depth
    prompts = rows * prompt / each * (cached + at_once)
    sampling = max(prompts, rows * row * cached + TEMPORARIES * min(FLOAT * rows * vocabulary, chunk))
    pass_rows = min(rows, PASS_ROWS, max(1, PASS_TOKENS[kind] // read))
    scored = min(rows, SCORING_ROWS, max(1, SCORING_TOKENS // row)) if setup.scorers.models else 0
    reading = max(pass_rows * read, scored * row) * at_once
    pieces = TEMPORARIES * min(pass_rows * logits, FLOAT * CHUNK_ELEMENTS * (1 if kind == "cpu" else DEVICE_CHUNKS))
    comparing = FLOAT * ceiling + 2 * min(pass_rows * logits, chunk) + pieces
    exact = config.kl.placement != "reward" and config.kl.estimator == "exact"  # the KL is in the loss
    copies = 3 if exact else 2  # of logits: the policy's, their gradient, the reference's
    if config.policy.gradient_checkpointing:
        weights, per_token = weights / depth, FLOAT * depth * hidden + per_token / depth
    return MemoryEstimate(
        kept=int(FLOAT * (own * part + frozen + 2 * trained * part + centred)),
        states=FLOAT * rows * states,
        rollout=int(FLOAT * (full * (1 - part) + all_frozen - frozen) + max(sampling, reading, comparing)),
        training=int(FLOAT * (ceiling + shard * (2 * layer + outside))),
        gradients=int(FLOAT * (trained * part + shard * trained / full * (layer + outside))),
        tied=FLOAT * head.numel() if head is inputs.weight and head.requires_grad else 0,
        per_pass=int(models * weights + exact * pieces),
        per_row=int(read * models * per_token),
        logits=copies * logits,
        chunk=copies * chunk,
        minibatch=minibatch,
        rows=min(max(1, in_pass), minibatch),
    )


def kept_by_autograd(lm: LM) -> tuple[float, float]:
    """Bytes that a pass keeps for its backward pass beside the parameters: whatever its size, and for each token.

    From two short passes. In bfloat16 they keep copies of the weights.
    """
    parameters = {parameter.untyped_storage()._cdata for parameter in lm.model.parameters()}

    def kept(tokens: int) -> int:
        storages = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor.detach()  # an output that is saved would hold itself

        ids = torch.ones(1, tokens, dtype=torch.long, device=lm.device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), lm.precision():
            lm.base.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return sum(storage.nbytes() for number, storage in storages.items() if number not in parameters)

    per_token = (kept(16) - kept(8)) / 8
    return kept(8) - 8 * per_token, per_token


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
