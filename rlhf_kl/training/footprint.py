"""What each process of a run needs in memory, phase by phase: arithmetic over a config and the outlines of its models.

A phase is counted at its largest moment, for the longest prompts and for responses that do not end. A prompt that
several responses share is counted for each, but where it is sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.gradients import BUCKET
from rlhf_kl.memory import tokens_of_a_pass
from rlhf_kl.models.engine import MEMORY
from rlhf_kl.models.logits import can_shift
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.perplexity import MOST_TOKENS
from rlhf_kl.ops.head import Head
from rlhf_kl.ops.logprobs import CHUNK_ELEMENTS, DEVICE_CHUNKS
from rlhf_kl.ppo.heldout import EACH, SHOWN
from rlhf_kl.ppo.states import PASS_ROWS, PASS_TOKENS
from rlhf_kl.rewards.model import SCORING_ROWS
from rlhf_kl.training.outlines import Outline, Outlines, Sizes
from rlhf_kl.training.sets import CHARACTERS
from rlhf_kl.training.start import AT_END

FLOAT, HALF = 4, 2  # bytes of a number in float32, and in bfloat16 or float16
TEMPORARIES = 6  # copies in float32 of logits that are drawn from, or of the piece that is compared
ENGINE_ROOM = 1.2  # times the weights of an engine, for what it computes
Parts = dict[str, float]  # bytes by what takes them


@dataclass(frozen=True)
class Place:
    """Where a run is to go."""

    device: torch.device
    processes: int
    memory: float  # bytes of the device of each process
    prompt: int  # tokens of the longest prompt


def total(parts: Parts) -> float:
    """Bytes of a phase."""
    return sum(parts.values())


class Footprint:
    """Bytes in each process of a run."""

    def __init__(self, config: TrainConfig, models: Outlines, place: Place) -> None:
        self.config, self.models, self.place, self.policy = config, models, place, models.policy
        shape, model = self.policy.shape, self.policy.model
        self.hidden, self.vocabulary = int(shape.hidden_size), int(shape.vocab_size)
        self.depth = int(shape.num_hidden_layers)
        self.half, self.adapted = config.run.dtype != "float32", has_adapter(model)
        self.size = HALF if self.half else FLOAT  # of a number in the layers
        self.shards, self.apart = config.policy.shard, config.reference.shard
        self.rows, self.new = config.rollout.batch_size // place.processes, config.rollout.max_new_tokens
        self.length = place.prompt + self.new
        self.every, self.learning = self.policy.every, self.policy.learning
        self.head = Head(lambda x: x, self.vocabulary, self.every.inside + self.every.outside)
        value = Sizes() if models.value is None else models.value.every
        parts = place.processes if self.shards else 1
        self.value = FLOAT * (value.inside + value.outside) / parts  # its weights, and its gradients
        self.trained = FLOAT * (self.learning.inside + self.learning.outside) / parts  # the same of the policy
        self.weights = FLOAT * self.head.parameters / parts
        if not self.shards:  # frozen layers are stored in the type that they compute in
            self.weights -= (FLOAT - self.size) * (self.every.inside - self.learning.inside)
        # On a GPU products with the head may round a copy of it; layers that learn are copied while they compute.
        self.rounds = config.run.dtype == "bfloat16"
        rounds = self.rounds and place.device.type == "cuda" and can_shift(model.get_output_embeddings(), shape)
        self.rounded = float(HALF * self.vocabulary * self.hidden * rounds)
        self.copies = float(HALF * self.learning.inside * (self.half and not self.shards))

    def phases(self) -> dict[str, Parts]:
        """By name, the parts of each."""
        rest, ceiling = self.rest(), {"ceiling": self.kept_by_ceiling()}
        loaded = {"moments": 0.0, "states": 0.0, "engine": 0.0}
        more: dict[str, Parts] = {
            "models loaded": loaded,
            "at rest": {},
            "sampling": self.sampling(self.rows),
            "reading": self.comparing(self.rows),
            "scoring": self.reading(self.models.rewards, min(self.rows, SCORING_ROWS), 0.0),
            "training pass": self.training() | ceiling,
            "KL after the update": self.comparing(self.rows) | ceiling,
            "evaluation": self.evaluation(),
            "checkpoint": self.saving(),
        }
        return {name: {part: size for part, size in (rest | parts).items() if size} for name, parts in more.items()}

    # ---- what is there all the time

    def rest(self) -> Parts:
        """Between two updates."""
        copies = (1 + self.adapted) * self.rounded + self.adapted * self.trained  # frozen heads, the adapter's start
        return {
            "weights": self.weights + self.value,
            "frozen models": self.frozen(self.size) + copies,
            "moments": 2 * (self.trained + self.value),
            "states": self.states(self.rows),
            "engine": self.engine * self.place.memory,
        }

    @property
    def engine(self) -> float:
        """Share of the device that the engine takes."""
        rollout = self.config.rollout
        return 0.0 if rollout.engine is None else float(rollout.engine_options.get("gpu_memory_utilization", MEMORY))

    @property
    def engine_needs(self) -> float:
        """Share of the device that an engine needs, in twentieths: for its weights, and keys and values of one row."""
        least = ENGINE_ROOM * self.size * self.head.parameters + self.cached(1, self.length)
        return 0.0 if self.config.rollout.engine is None else math.ceil(20 * least / self.place.memory) / 20

    def frozen(self, size: int) -> float:
        """Models that are only read, `size` bytes a number in the layers; all else is whole and float32."""
        models = [self.models.reference, *self.models.rewards, *self.models.watched]
        parts = self.place.processes if self.apart else 1
        sizes = [each.every for each in models if each is not None]
        return sum((size * each.inside / parts + FLOAT * each.outside for each in sizes), 0.0)

    def states(self, rows: int) -> float:
        """What is kept of frozen models at the states of so many responses: see `ppo.states`."""
        tokens = rows * self.new
        numbers = tokens * (self.hidden + self.vocabulary * self.keeps_logits(rows))
        if self.config.critic == "features":
            others = sum(int(each.shape.hidden_size) for each in self.models.rewards)
            numbers += tokens * (self.hidden + others) + rows * self.length * others
        return float(FLOAT * numbers)

    def keeps_logits(self, rows: int) -> bool:
        """Whether the reference's logits at so many responses are kept."""
        return rows * self.new <= self.head.chunk(self.place.device)

    def kept_by_ceiling(self) -> float:
        """The weights of before an update, where the way from the reference is not known."""
        ceiling, known = self.config.kl.ceiling, self.config.reference.model in (None, self.config.policy.model)
        return 0.0 if known or self.adapted or ceiling is None or ceiling.action != "backtrack" else self.trained

    # ---- passes without gradients

    def logits(self, tokens: int, copies: float, *, grows: bool = False, compares: bool = False) -> float:
        """Copies of the logits of so many tokens, as far as they exist at once, and what comparing them takes."""
        piece = CHUNK_ELEMENTS * (1 if self.place.device.type == "cpu" else DEVICE_CHUNKS)  # see `ops.logprobs`
        most = min(tokens, self.head.chunk(self.place.device, grows=grows))
        pieces = TEMPORARIES * min(piece, tokens * self.vocabulary) * compares
        return FLOAT * (copies * self.vocabulary * most + pieces)

    def cached(self, rows: int, tokens: int) -> float:
        """Keys and values."""
        shape = self.policy.shape
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        each = getattr(shape, "head_dim", None) or self.hidden // shape.num_attention_heads
        return float(2 * self.size * self.depth * heads * each * rows * tokens)

    def gathered(self, read: Sequence[Outline]) -> float:
        """Two layers of sharded models that are read, this one and the next; embeddings and head of the policy."""
        found = [each for each in read if (self.shards if each is self.policy else self.apart)]
        layers = max((each.every.layer for each in found), default=0)
        return float(2 * self.size * layers + FLOAT * self.every.outside * (self.policy in found))

    def sampling(self, rows: int) -> Parts:
        """The larger of: the prompts are read, and the last token is drawn. Nothing where an engine does both."""
        if self.config.rollout.engine is not None:
            return {}
        prompt, cache = self.place.prompt, self.cached(rows, self.length) * (1 + 1 / self.depth)  # a layer's grows
        once = self.policy.at_once * prompt / self.length * rows / self.config.rollout.samples_per_prompt
        moments = (
            {"cache": self.cached(rows, prompt), "activations": once},
            {"cache": cache, "logits": self.logits(rows, TEMPORARIES)},
        )
        whole = float(self.size * self.every.inside + FLOAT * self.every.outside) * self.shards
        return {"gathered": whole, "copies": self.copies + self.rounded} | max(moments, key=total)

    def reading(self, read: Sequence[Outline], rows: float, logits: float) -> Parts:
        """A pass of so many rows through each of these models."""
        once = max((each.at_once for each in read), default=0.0)
        copies = self.copies if self.policy in read else 0.0
        return {"gathered": self.gathered(read), "copies": copies, "activations": rows * once, "logits": logits}

    def comparing(self, rows: int) -> Parts:
        """Policy, reference and value at the sampled tokens."""
        read = [each for each in (self.policy, self.models.reference, self.models.value) if each is not None]
        most = PASS_TOKENS.get(self.place.device.type, PASS_TOKENS["cpu"]) // self.length
        together = min(rows, PASS_ROWS, max(1, most))
        tokens = together * self.new  # those of the policy in chunks; those of the reference too, if they are not kept
        logits = self.logits(tokens, 1, compares=True) + self.logits(tokens, 1, grows=self.keeps_logits(rows))
        return self.reading(read, together, logits)

    def evaluation(self) -> Parts:
        """The largest of: responses are drawn, compared and scored; texts are read."""
        held, most = self.config.eval, max(1, self.rows, min(PASS_ROWS, PASS_TOKENS["cpu"] // self.length))
        asked = max(held.most_responses + SHOWN * (EACH - 1), (AT_END - 1) * held.most_responses)
        rows = min(-(-asked // self.place.processes), most)
        read = CHARACTERS // 3 if held.max_documents == "auto" else MOST_TOKENS  # three characters a token, or more
        texts = self.reading([self.policy], read / self.length, self.logits(read, 1))
        compared = self.comparing(rows) | {"states of the evaluation": self.states(rows)}
        scored = self.reading(self.models.watched, min(rows, SCORING_ROWS), 0.0)
        return max(self.sampling(rows), compared, scored, texts, key=total)

    def saving(self) -> Parts:
        """Of shards, the largest tensor of `final/`; parts of a checkpoint are copied in the host's memory."""
        if self.shards and self.place.device.type == "cpu":
            return {"copy": 3 * (self.trained + self.value)}
        return {"gathered": float(FLOAT * self.vocabulary * self.hidden * self.shards)}

    # ---- a training pass

    @property
    def rows_of_a_pass(self) -> int:
        """Responses in a training pass."""
        rows, models = self.config.ppo.microbatch_size, 1 if self.models.value is None else 2
        if rows is None:
            size = self.policy.model, self.place.device, self.config.run.dtype
            rows = tokens_of_a_pass(*size, models=models) // self.length
        return max(1, min(rows, self.config.minibatch_size // self.place.processes))

    def training(self) -> Parts:
        """The larger of: the backward pass begins, with all activations, and ends, with all gradients."""
        rows, kl, gradients = self.rows_of_a_pass, self.config.kl, self.trained + self.value
        later = rows < self.config.minibatch_size // self.place.processes  # a pass finds the gradients of earlier ones
        kept = self.policy.kept
        if self.config.policy.gradient_checkpointing:  # the inputs of all layers, and the layer that is recomputed
            kept = FLOAT * self.length * self.depth * self.hidden + kept / self.depth
        if self.models.value is not None:
            kept += self.models.value.kept
        exact = kl.placement != "reward" and kl.estimator == "exact"
        copies = 2 + exact + self.rounds / 2  # the policy's, their gradient and its rounded copy, the reference's
        head = self.vocabulary * self.hidden * (self.learning.outside > 0)
        begin = {
            "activations": rows * kept,
            "copies": self.copies + self.rounded * (head > 0),
            "logits": self.logits(rows * self.new, copies, grows=True, compares=exact),
            "gradients": gradients * later,
        }
        model, more = self.policy.model, 0
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            more += (2 + later) * head  # a gradient for each use
        if self.shards:  # whole ones, and what is sent of them
            more += 2 * (self.learning.outside + self.every.layer)
        elif self.place.processes > 1:
            more += max(BUCKET, head)
        return {"gathered": self.gathered([self.policy])} | max(
            begin, {"gradients": gradients + FLOAT * more}, key=total
        )
