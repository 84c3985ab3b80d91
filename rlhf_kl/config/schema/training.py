"""The config of `rlhf-kl train`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from rlhf_kl.builtin.world import DEFAULT_WORLD, is_builtin
from rlhf_kl.config.schema.control import KLSection
from rlhf_kl.config.schema.eval import EvalSection, with_gold
from rlhf_kl.config.schema.reward import RewardSection
from rlhf_kl.config.schema.sections import (
    LARGEST,
    CheckpointSection,
    Count,
    Name,
    NonNegative,
    OptimiserSection,
    OptionalSource,
    Positive,
    RunSection,
    Section,
    Source,
    Template,
    TrackingSection,
    TunedSection,
    Unit,
    chat_problems,
    inner,
    refuse,
    require_divides,
    with_world,
)
from rlhf_kl.errors import suggestion


class PolicySection(TunedSection):
    model: Source
    """Starting policy: a local folder, a GGUF file, a hub id (owner/name, owner/name@revision), or builtin:reviews."""
    value: Literal["features", "head", "separate"] = "features"
    """Value function: features = a small network on hidden states of the reference and the reward model; head =
    a head on the policy; separate = another model, initialised from the reward model."""
    shard: bool = False
    """Shard the weights, gradients and Adam's moments of the trained models over the processes (FSDP2).

    Each process reads its part from the disk. It gathers one layer at a time in training, and all of them to sample.
    Never run: several GPUs.
    """


class ReferenceSection(Section):
    model: OptionalSource = None
    """Reference model for the KL; null = a frozen copy of the starting policy."""
    shard: bool = False
    """Shard the layers of reference and reward models over the processes, in the run's dtype; gathered for a rollout.

    Never run: several GPUs.
    """


class PromptsSection(Section):
    prompts: Source
    """Prompts to train on: .jsonl .json .csv .parquet .txt, a hub id (owner/name:subset@revision), or builtin:NAME.

    Default: the prompts of the built-in policy.
    """
    split: Name = "train"
    """Split of a hub id, folder or file, such as train or train[:1000]; a file is train."""
    column: Name = "prompt"
    """Column or key of the prompt."""
    template: Template | None = None
    """Template for the prompt from several columns, such as "Title: {title}"; null = `column` as it is."""
    first_tokens: Count | None = None
    """Keep only this many tokens from the start of a prompt; null = all."""
    chat_template: bool | Literal["auto"] = "auto"
    """Write prompts as turns with the tokenizer's chat template; auto = if it has one and they are conversations."""
    system: str | None = None
    """System message before the prompt, if the chat template is used; reward models that read chats get it too."""
    chat_options: dict[Name, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}, if it is used."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        refuse(*chat_problems(self, chat=bool(self.chat_template)))
        return self


class RolloutSection(Section):
    batch_size: Count = 64
    """Responses per update, over all processes."""
    max_new_tokens: Count = 48
    """Maximum number of tokens in a response; a longer response is cut off."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are computed with it too."""
    engine: Literal["vllm"] | None = None
    """What draws the responses of the updates; null = this program's own decoding. vllm: `pip install 'rlhf-kl[vllm]'`.

    Each process has an engine for its rows, which draws the responses of evaluations and the reference samples too. It
    gets a model's weights before it draws, of a sharded one layer by layer, and an adapter as an adapter where vLLM
    knows the architecture so. The trainer computes log-probs, KL and loss itself, and weighs each token by policy over
    engine (at most 2). Not promised then: a resumed run that is the same bit for bit.
    """
    engine_options: dict[Name, Any] = Field(default_factory=dict)
    """Options of the engine, such as {gpu_memory_utilization: 0.3, enforce_eager: true} for vLLM's `LLM`."""
    samples_per_prompt: Count = 1
    """Responses to each prompt of a batch; must divide batch_size. rloo and grpo compare them."""
    reference_samples: Annotated[int, Field(ge=2, le=LARGEST)] | None = None
    """Most responses sampled from the reference at the start, to normalise scores and to compute the starting beta.

    null = an eighth of ppo.total_episodes, at most 1024, at least 128 (under 512 episodes a quarter of them, at least
    64). Sampling ends earlier once both are known; while all scores are equal it draws up to four times as many.
    """

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        require_divides("rollout.samples_per_prompt", self.samples_per_prompt, "rollout.batch_size", self.batch_size)
        share = self.engine_options.get("gpu_memory_utilization", 1)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            refuse(f"rollout.engine_options.gpu_memory_utilization: {share!r} is no share of a GPU, such as 0.3")
        return self


class PPOSection(OptimiserSection):
    total_episodes: Count = 3840
    """Responses in the whole run, rounded up to whole batches."""
    epochs: Count = 1
    """Passes over each batch."""
    minibatch_size: Count | None = None
    """Responses per optimiser step; must divide rollout.batch_size.

    null = a quarter of the batch; if that is not a divisor, the next larger one.
    """
    microbatch_size: Count | None = None
    """Maximum responses in a training pass; must divide minibatch_size. It changes the memory use, not the result.

    null = as many as fit into 96 MiB of activations on a CPU, 8 GiB on a GPU, or the weights' size.
    """
    learning_rate: Positive | Literal["auto"] = "auto"
    """Peak learning rate of Adam; auto = from the policy's number of parameters, ten times as high for an adapter."""
    lr_schedule: Literal["constant", "linear", "cosine", "adaptive"] = "adaptive"
    """Learning-rate schedule of the run: constant, or linear or cosine decay to zero.

    adaptive = linear, times a factor from 0.01 to 10 that paces the way to the target and then only falls.
    """
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    advantage: Literal["gae", "rloo", "grpo"] = "gae"
    """Advantage estimator: gae uses a value function; rloo and grpo use the other responses to the prompt.

    All three subtract beta times the KL as it is; it is never divided by a group's standard deviation.
    """
    scale_by_group_std: bool = True
    """If advantage is grpo: divide scores by the standard deviation of their group."""
    gamma: Unit = 1.0
    """Discount."""
    lam: Unit = 0.95
    """Lambda of generalised advantage estimation."""
    critic_lam: Unit | None = None
    """Lambda of the value function's targets; null = lam, but 1 for `features` (the sum of the rewards)."""
    critic_epochs: Count = 5
    """Passes over each batch to fit the value function; only for `features`."""
    critic_learning_rate: Positive = 2.0e-3
    """Learning rate of the value function; only for `features`."""
    value_warmup: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """Updates at the start that train the value function only."""
    cliprange: Positive = 0.2
    """Clip range of the probability ratio."""
    cliprange_value: Positive = 0.2
    """Clip range of the change of a value; only for `head` and `separate`."""
    vf_coef: NonNegative = 0.1
    """Weight of the value loss beside the policy loss; only for `head` and `separate`."""
    whiten_rewards: bool = False
    """Scale rewards to standard deviation 1 within a batch."""
    max_update_kl: Positive | None = None
    """Stop an update early if the KL of the policy to the one that sampled exceeds this (nats per token)."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages need a value function; the other kinds compare the responses to a prompt."""
        return self.advantage == "gae"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not self.has_critic:
            fixed: dict[str, Any] = {"gamma": 1.0, "value_warmup": 0, "whiten_rewards": False}
            wrong = {name: getattr(self, name) for name, value in fixed.items() if getattr(self, name) != value}
            refuse(*(f"ppo.{name} is only for ppo.advantage gae: {value!r}" for name, value in wrong.items()))
        return self


def minibatch_rows(ppo: PPOSection, rollout: RolloutSection) -> int:
    """`ppo.minibatch_size`, or where it is null the smallest divisor of the batch that is a quarter or more."""
    if ppo.minibatch_size is not None:
        return ppo.minibatch_size
    steps = next(n for n in (4, 3, 2, 1) if rollout.batch_size % n == 0)
    return rollout.batch_size // steps


BEST = ("objective/scores", "objective/scores_shaped", "eval/scores", "eval/perplexity")  # beside the scorers


class TrainCheckpointSection(CheckpointSection):
    best: Name | None = None
    """Also keep the checkpoint with the best value of this metric (lowest perplexity, else highest); null = none.

    objective/scores, objective/scores_shaped, eval/scores, eval/perplexity, or eval/NAME of a scorer. Where beta
    follows the KL, a policy counts only with a KL of at most 1.25 times the target.
    """


class TrainTrackingSection(TrackingSection):
    samples_every: Count = 10
    """Updates between two sets of rows in samples.jsonl."""


class TrainConfig(Section):
    """PPO with a KL controller."""

    run: RunSection = Field(default_factory=RunSection)
    policy: PolicySection
    reference: ReferenceSection = Field(default_factory=ReferenceSection)
    reward: RewardSection
    data: PromptsSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    ppo: PPOSection = Field(default_factory=PPOSection)
    kl: KLSection = Field(default_factory=KLSection)
    eval: EvalSection
    checkpoint: TrainCheckpointSection = Field(default_factory=TrainCheckpointSection)
    tracking: TrainTrackingSection = Field(default_factory=TrainTrackingSection)

    @model_validator(mode="before")
    @classmethod
    def _world(cls, raw: Any) -> Any:
        """The prompts, texts and reward models of a built-in policy."""
        if not isinstance(raw, dict):
            return raw
        world = inner(raw, "policy").get("model", DEFAULT_WORLD)
        raw = with_world(raw, world, "policy.model", "data.prompts", "eval.texts")
        reward = raw.setdefault("reward", {})
        for scorer in (reward, *inner(raw, "reward", "terms").values()):
            own = isinstance(scorer, dict) and scorer.get("kind", "model") == "model" and scorer.get("model") is None
            if own and is_builtin(world):
                scorer["model"] = str(world)
        with_gold(raw)
        return raw

    @property
    def updates(self) -> int:
        """Rollouts in the whole run."""
        return math.ceil(self.ppo.total_episodes / self.rollout.batch_size)

    @property
    def controlled_updates(self) -> int:
        """Updates in which the controller changes beta: all after the warm-up of the value function."""
        return max(1, self.updates - self.ppo.value_warmup)

    @property
    def minibatch_size(self) -> int:
        """Responses per optimiser step."""
        return minibatch_rows(self.ppo, self.rollout)

    @property
    def rows_together(self) -> int:
        """Neighbours of a batch in one minibatch: the responses to a prompt, where it has room for whole groups."""
        each = self.rollout.samples_per_prompt
        return each if self.minibatch_size % each == 0 else 1

    @property
    def reference_samples(self) -> int:
        """Responses sampled from the reference at the start; a short run does not spend most of its time on them."""
        written = self.rollout.reference_samples
        episodes = self.ppo.total_episodes
        return min(1024, max(64, min(128, episodes // 4), episodes // 8)) if written is None else written

    @property
    def critic(self) -> Literal["features", "head", "separate"] | None:
        """The kind of value function; None where the advantages need none."""
        return self.policy.value if self.ppo.has_critic else None

    @property
    def critic_lam(self) -> float:
        """Lambda of the value function's targets."""
        otherwise = 1.0 if self.policy.value == "features" else self.ppo.lam
        return otherwise if self.ppo.critic_lam is None else self.ppo.critic_lam

    # On the field and not on the model, so that it runs while another section is still wrong.
    @field_validator("ppo")
    @classmethod
    def _divides(cls, ppo: PPOSection, info: ValidationInfo) -> PPOSection:
        rollout: RolloutSection | None = info.data.get("rollout")
        if rollout is not None:
            size, batch = minibatch_rows(ppo, rollout), rollout.batch_size
            require_divides("ppo.minibatch_size", size, "rollout.batch_size", batch)
            require_divides("ppo.microbatch_size", ppo.microbatch_size or 1, "ppo.minibatch_size", size)
            if not ppo.has_critic and rollout.samples_per_prompt < 2:
                refuse(
                    f"rollout.samples_per_prompt must be at least 2 where ppo.advantage is {ppo.advantage}: a response "
                    "is compared with the others to its prompt"
                )
        return ppo

    @field_validator("checkpoint")
    @classmethod
    def _measured(cls, checkpoint: TrainCheckpointSection, info: ValidationInfo) -> TrainCheckpointSection:
        held: EvalSection | None = info.data.get("eval")
        if held is not None and checkpoint.best is not None:
            known = [*BEST, *(f"eval/{name}" for name in held.watched)]
            if checkpoint.best not in known:
                hint = suggestion(checkpoint.best, known)
                refuse(f"checkpoint.best: {checkpoint.best!r} is no figure of a run or of eval.scorers{hint}")
        return checkpoint
