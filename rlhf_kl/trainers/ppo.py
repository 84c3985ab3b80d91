"""PPO with a KL penalty to a frozen reference. Source: Ziegler et al. 2019 (1909.08593); Schulman et al. 2017."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.kernels.build import library
from rlhf_kl.kl_controllers import GuardedController
from rlhf_kl.models.activations import tokens_of_a_pass
from rlhf_kl.models.actor_critic import ActorCritic, plain_reason
from rlhf_kl.ops.gae import gae
from rlhf_kl.ops.kl import ESTIMATORS
from rlhf_kl.ops.logprobs import chosen_logprobs, exact_kl
from rlhf_kl.ops.losses import policy_loss, value_loss
from rlhf_kl.ops.masked import masked_mean, whiten
from rlhf_kl.ops.packing import Packed
from rlhf_kl.ops.reward_shaping import kl_of_next_states, shape_rewards
from rlhf_kl.reward_functions import (
    GoldScorer,
    RewardModel,
    ScoreShaping,
    WeightedSum,
    checked_scores,
    gold_scores_of,
    response_traits,
)
from rlhf_kl.rollout.collect import Measured, Sampling, assemble, draw, exact_kl_now, measure, response_texts
from rlhf_kl.rollout.decoded import DECODING_AGREES, DecodedStates
from rlhf_kl.rollout.features import StateFeatures
from rlhf_kl.rollout.reference import KEPT_ELEMENTS, ReferenceLogits
from rlhf_kl.rollout.sampling import Sampled
from rlhf_kl.seeding import shuffled, uniforms
from rlhf_kl.trainers.ceiling import Cut, KLForecast, shorten_update
from rlhf_kl.trainers.critic import fit_critic
from rlhf_kl.trainers.guards import Microbatch, all_finite, non_finite_figure
from rlhf_kl.trainers.metrics import Gathered, rollout_metrics
from rlhf_kl.trainers.optim import lr_factor, set_learning_rate
from rlhf_kl.types import PromptBatch, RewardFn, RolloutBatch

# What a row says of the epochs.
LOSSES = (
    "policy/loss",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/logratio_first_max",
    "policy/grad_norm",
    "policy/learning_rate",
    "policy/epochs",
    "value/loss",
    "value/explained_variance",
)


@dataclass(frozen=True)
class Update:
    """One update: its row of metrics, and the samples it was made from."""

    row: dict[str, Any]
    prompts: list[str]
    responses: list[str]
    gold: list[float] | None
    rollout: RolloutBatch
    skipped: str | None = None  # why steps of this update were left out
    weights_lost: bool = False  # a weight is not finite any more: there is nothing to go on with


@dataclass(frozen=True)
class Targets:
    """What the losses of one update pull towards; tensors (B, T)."""

    advantages: Tensor  # whitened over the global batch
    returns: Tensor
    kl_weight: float  # beta of the KL in the loss, in units of the whitened advantages; 0 = none there


class PPOTrainer:
    """Everything one update needs; `update(step)` is the algorithm."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        model: ActorCritic,
        optimizer: torch.optim.Optimizer,
        reference: Any,
        reward: RewardFn,
        shaping: ScoreShaping,
        controller: GuardedController,
        prompts: PromptStream,
        tokenizer: Any,
        sampling: Sampling,
        gold: GoldScorer | None = None,
        feature_rewards: Sequence[RewardModel] = (),
    ) -> None:
        """`feature_rewards`: reward models whose states the model's critic reads, where it has one."""
        self.config, self.accelerator = config, accelerator
        keep_from_ddp(model)
        # The optimizer stays as it is: accelerate's looks for packages on the disk at each of the critic's many steps.
        self.model, self.optimizer = accelerator.prepare(model), optimizer
        self.core: ActorCritic = accelerator.unwrap_model(self.model)
        self.reference, self.reward, self.gold = reference, reward, gold
        self.reference_logits = ReferenceLogits(reference, keep=True)
        critic = self.core.critic
        self.features = StateFeatures(critic, feature_rewards) if critic is not None else None
        self.decoding_agrees: bool | None = None  # not known before the first rollout
        self.notes: list[str] = []
        self.shaping, self.controller = shaping, controller
        self.prompts, self.tokenizer, self.sampling = prompts, tokenizer, sampling
        self.forecast = KLForecast()
        self.microbatch = Microbatch(config.ppo.microbatch_size or config.ppo.minibatch_size)
        self.pass_tokens = most_tokens_of_a_pass(config, self.core, accelerator.device)
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        self.local_rows = config.rollout.batch_size // self.world
        fitted = {id(p) for p in critic.parameters()} if critic is not None else set()
        self.trained = [p for p in self.core.parameters() if p.requires_grad and id(p) not in fitted]

    # ------------------------------------------------------------------ one update

    def update(self, step: int) -> Update:
        """Update number `step` (from 1). The row describes the policy that sampled its rollout."""
        cfg, controller, device = self.config, self.controller, self.accelerator.device
        started = time.perf_counter()
        prompts = self.prompts.batch(step, self.rank * self.local_rows, self.local_rows)
        noise = uniforms(cfg.rollout.batch_size, self.sampling.max_new_tokens, cfg.run.seed, "rollout", step)
        mine = noise[self.rank * self.local_rows :][: self.local_rows]
        with self.autocast():
            decoded = self.listener(len(prompts))
            sampled = draw(self.core.policy, prompts, mine, self.sampling, device, decoded)  # 1. y ~ pi(.|x)
        responses = response_texts(self.tokenizer, sampled)
        sampled_at = time.perf_counter()
        scores, terms = self.score(prompts.texts, responses)
        gold = gold_scores_of(self.gold, prompts.texts, responses)
        traits = response_traits(sampled.ids, sampled.mask, sampled.ended)
        shaped = self.shaping(scores, traits)
        with self.autocast():
            measured = self.measure(prompts, sampled, decoded)
        rollout = assemble(prompts, sampled, measured, scores, shaped)
        scored_at = time.perf_counter()

        coef = controller.coef
        targets = self.targets(rollout, coef)  # 2. rewards, 3. advantages
        before = [p.detach().clone() for p in self.trained] if self.backtracks else []
        skipped = non_finite_figure(rollout)
        if skipped is None:
            losses = self.optimize(rollout, targets, step)  # 4. clipped epochs
            skipped = losses.pop("skipped")
        else:
            losses = dict.fromkeys(LOSSES, math.nan)
        gathered = self.gather(rollout, gold)
        row = rollout_metrics(gathered, coef, cfg.kl.target_value, cfg.kl.unit)
        kl = row[f"kl/{cfg.kl.unit}"]
        lost = not all_finite(self.trained)
        if math.isfinite(kl) and not lost:
            self.forecast.observe(kl)
            cut = self.hold_ceiling(rollout, before, kl)
        else:
            cut = Cut(1.0, kl, math.nan, math.nan)
        controller.observe_update(kl, cut.kl_after, cut.kl_whole)
        alerts = controller.update(kl, cfg.rollout.batch_size)  # 5. move beta toward the target
        alerts += self.microbatch.alerts() + self.notes
        self.notes = []
        if skipped is not None:
            alerts.append(f"update-skipped: {skipped} was not finite, so what needs it was left out")
        if lost:
            alerts.append("weights-lost: a weight is not finite any more")
        row |= losses
        row |= {
            name: float(self.sum_over_processes(part.mean().to(rollout.mask.device)) / self.world)
            for name, part in {
                **{f"reward/{name}": part for name, part in terms.items()},
                **{f"penalty/{name}": part for name, part in self.shaping.penalties(traits).items()},
            }.items()
        }
        row |= {
            "step": step,
            "episodes": step * cfg.rollout.batch_size,
            "kl/coef": coef,
            "kl/coef_next": controller.coef,
            "kl/ceiling": self.ceiling,
            "kl/backtrack_factor": cut.factor,
            "kl/after_update": cut.kl_after,
            "dist/world_size": self.world,
            "dist/coef_spread": self.spread(controller.coef),
            "time/rollout_s": sampled_at - started,
            "time/score_s": scored_at - sampled_at,
            "time/update_s": time.perf_counter() - scored_at,
            "alerts": alerts,
        }
        return Update(row, prompts.texts, responses, gold, rollout, skipped, lost)

    def listener(self, rows: int) -> DecodedStates | None:
        """Keeps what the policy says while it samples; None where scoring has to ask it again."""
        states = rows * self.sampling.max_new_tokens
        fits = states * self.reference_logits.vocabulary <= KEPT_ELEMENTS
        exact = self.config.run.dtype == "float32" and plain_reason(self.core.policy) is None
        return DecodedStates() if fits and exact and self.decoding_agrees is not False else None

    def measure(self, prompts: PromptBatch, sampled: Sampled, decoded: DecodedStates | None) -> Measured:
        """Policy, reference and values at the sampled tokens; the first time also whether decoding agrees."""
        temperature, kept = self.sampling.temperature, self.reference_logits
        if decoded is None:
            return measure(self.model, self.reference, prompts, sampled, temperature, kept, features=self.features)
        found = measure(self.core, self.reference, prompts, sampled, temperature, kept, decoded, self.features)
        if self.decoding_agrees is None:
            whole = measure(self.model, self.reference, prompts, sampled, temperature, kept, features=self.features)
            gap = self.max_over_processes((found.logprobs - whole.logprobs).abs().max())
            self.decoding_agrees = bool(gap <= DECODING_AGREES)
            if not self.decoding_agrees:
                self.notes.append(
                    f"slower-scoring: log-probs from sampling differ by {float(gap):.2g} from those of whole rows, "
                    "so the policy is asked twice from now on"
                )
                return whole
        return found

    def score(self, prompts: list[str], responses: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Raw scores (B,), and of a sum what each term adds to them.

        A model's may be anything: it spoils this update at most; a function's are checked.
        """
        if isinstance(self.reward, RewardModel):
            return self.reward.score(prompts, responses), {}
        if isinstance(self.reward, WeightedSum):
            return self.reward.score(prompts, responses)
        return checked_scores(self.reward, prompts, responses, self.config.reward.kind), {}

    # ------------------------------------------------------------------ rewards and advantages

    def targets(self, rollout: RolloutBatch, coef: float) -> Targets:
        """Rewards shaped by the KL where it belongs into the reward, then advantages and returns."""
        cfg = self.config.ppo
        kl = self.kl_in_reward(rollout)
        rewards = shape_rewards(rollout.shaped_scores, kl, rollout.mask, coef)
        scale = torch.ones(())
        if cfg.whiten_rewards:
            rewards, scale = whiten(rewards, rollout.mask, center=False, reduce=self.sum_over_processes)
        advantages, returns = gae(rewards, rollout.values, rollout.mask, cfg.gamma, cfg.lam)
        critic_lam = 1.0 if cfg.critic_lam is None and self.features is not None else cfg.critic_lam
        if critic_lam is not None:
            _, returns = gae(rewards, rollout.values, rollout.mask, cfg.gamma, critic_lam)
        advantages, std = whiten(advantages, rollout.mask, reduce=self.sum_over_processes)
        # The KL in the loss stands beside advantages that were divided by these: so is its beta.
        weight = 0.0 if self.config.kl.placement == "reward" else coef / float(scale * std)
        return Targets(advantages, returns, weight)

    def kl_in_reward(self, rollout: RolloutBatch) -> Tensor:
        """What each token pays in the reward, before beta: (B, T)."""
        kl = self.config.kl
        if kl.placement == "loss":
            return torch.zeros_like(rollout.logprobs)
        if kl.placement == "rao_blackwell":
            return kl_of_next_states(rollout.exact_kl, rollout.mask)
        if kl.estimator == "exact":
            return rollout.exact_kl
        return ESTIMATORS[kl.estimator](rollout.logprobs, rollout.ref_logprobs)

    # ------------------------------------------------------------------ epochs

    def optimize(self, rollout: RolloutBatch, targets: Targets, step: int) -> dict[str, Any]:
        """Several epochs of clipped minibatch updates; returns the means over what was trained on."""
        cfg = self.config.ppo
        set_learning_rate(
            self.optimizer, cfg.learning_rate * lr_factor(cfg.lr_schedule, (step - 1) / self.config.updates)
        )
        size = cfg.minibatch_size // self.world
        totals: dict[str, float] = {}
        first_max, skipped, taken, trained = math.nan, None, 0, 0.0
        learning = self.features is None or step > cfg.value_warmup
        epochs = cfg.epochs if learning else 0  # a critic needs nothing of the policy's epochs
        for epoch in range(epochs):
            order = shuffled(len(rollout), self.config.run.seed, "minibatches", step, epoch)
            epoch_kl = 0.0
            for number, rows in enumerate(order.split(size)):
                stats, finite = self.minibatch(rollout, targets, rows, step)
                if epoch == 0 and number == 0:
                    first_max = stats["max_logratio"]
                if not finite:
                    skipped = "a gradient"
                    continue
                taken += 1
                epoch_kl = stats["approx_kl"] / stats["tokens"]
                trained += stats["tokens"]
                for name, value in stats.items():
                    totals[name] = totals.get(name, 0.0) + value
            if cfg.max_update_kl is not None and epoch_kl > cfg.max_update_kl:
                break
        means = {name: value / trained for name, value in totals.items()}
        if self.features is not None:
            means["value_loss"], finite = self.fit_critic(self.features, rollout, targets, step)
            skipped = skipped if finite else "the loss of the value function"
        return {
            "policy/loss": means.get("policy_loss", math.nan),
            "policy/approx_kl": means.get("approx_kl", math.nan),
            "policy/clip_fraction": means.get("clipped", math.nan),
            "policy/logratio_first_max": first_max,
            "policy/grad_norm": totals["grad_norm"] / taken if taken else math.nan,
            "policy/learning_rate": self.optimizer.param_groups[0]["lr"],
            "policy/epochs": epoch + 1 if learning else 0,
            "value/loss": means.get("value_loss", math.nan),
            "value/explained_variance": self.explained_variance(rollout, targets),
            "skipped": skipped,
        }

    def fit_critic(
        self, features: StateFeatures, rollout: RolloutBatch, targets: Targets, step: int
    ) -> tuple[float, bool]:
        """Bring the critic towards the returns of this rollout; its loss before that, and whether all was finite."""
        return fit_critic(
            features.critic,
            self.optimizer,
            features.kept,
            targets.returns[rollout.mask],
            epochs=self.config.ppo.critic_epochs,
            seed=self.config.run.seed,
            step=step,
            total=self.sum_over_processes,
        )

    def minibatch(
        self, rollout: RolloutBatch, targets: Targets, rows: Tensor, step: int
    ) -> tuple[dict[str, float], bool]:
        """One optimizer step; sums over the global minibatch, and whether the gradient was finite."""
        cfg = self.config.ppo
        tokens = float(self.sum_over_processes(rollout.mask[rows].sum().double()))

        def accumulate(size: int) -> tuple[Tensor, Tensor]:
            pieces = list(self.training_passes(rollout, rows, size))
            self.microbatch.largest = max(len(piece.ids) for piece in pieces)
            sums = torch.zeros(4, dtype=torch.float64, device=rollout.mask.device)
            largest = torch.zeros((), device=rollout.mask.device)
            for i, piece in enumerate(pieces):
                with self.no_sync(last=i == len(pieces) - 1):
                    loss, stats, top = self.losses(rollout, targets, piece, step)
                    # Token sums over the *global* count: microbatches and ranks of unequal length weigh right;
                    # DDP averages gradients over ranks, hence the factor.
                    self.accelerator.backward(loss * (self.world / tokens))
                sums += stats
                largest = torch.maximum(largest, top)
            return sums, largest

        sums, largest = self.microbatch.fit(accumulate, self.optimizer.zero_grad)
        if step <= cfg.value_warmup:  # a value head's gradient goes through the policy
            for parameter in self.core.policy.parameters():
                parameter.grad = None
        norm = self.accelerator.clip_grad_norm_(self.trained, cfg.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        sums = self.sum_over_processes(sums)
        names = ("policy_loss", "value_loss", "approx_kl", "clipped")
        largest = self.max_over_processes(largest)
        figures: dict[str, float] = dict(zip(names, sums.tolist(), strict=True))
        return figures | {"tokens": tokens, "grad_norm": float(norm), "max_logratio": float(largest)}, finite

    def training_passes(self, rollout: RolloutBatch, rows: Tensor, size: int) -> Iterator[Packed]:
        """The rows of a minibatch in microbatches of at most `size` rows and near-equal length."""
        bounds = self.reference_logits.pass_bounds(rollout.mask.device)
        if self.pass_tokens is not None:
            bounds["most_tokens"] = min(bounds["most_tokens"], self.pass_tokens)
        return rollout.layout.passes(rows.tolist(), most_rows=size, **bounds)

    def losses(
        self, rollout: RolloutBatch, targets: Targets, packed: Packed, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss of a microbatch, sums for the log (4,), and the largest |log ratio|."""
        cfg, temperature = self.config.ppo, self.sampling.temperature
        ids, old, ref, old_values, advantages, returns = (  # (N,) each: no padding, so no mask
            x.flatten()[packed.places]
            for x in (
                rollout.response_ids,
                rollout.logprobs,
                rollout.ref_logprobs,
                rollout.values,
                targets.advantages,
                targets.returns,
            )
        )
        with self.autocast():
            logits, values = self.model(packed.ids, packed.mask, packed.states, packed.prefixes)  # (N, V), (N,)
        logprobs = chosen_logprobs(logits, ids, temperature)
        surrogate, clipped = policy_loss(logprobs, old, advantages, cfg.cliprange)
        policy_total, value_total = surrogate.sum(), torch.zeros((), device=ids.device)
        if values is not None:
            value_total = value_loss(values, old_values, returns, cfg.cliprange_value).sum()
        loss = cfg.vf_coef * value_total
        if step > cfg.value_warmup:
            loss = loss + policy_total
            if targets.kl_weight:
                loss = loss + targets.kl_weight * self.kl_in_loss(packed, logits, logprobs, ref).sum()
        else:
            loss = loss + 0.0 * policy_total  # keeps every tensor in the graph for DDP
        log_ratio = (logprobs - old).detach()
        approx_kl = (torch.expm1(log_ratio) - log_ratio).sum()
        stats = torch.stack([policy_total.detach(), value_total.detach(), approx_kl, clipped.sum()])
        return loss, stats.double(), log_ratio.abs().max()

    def kl_in_loss(self, packed: Packed, logits: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Differentiable KL of each token for the loss: (N,)."""
        if self.config.kl.estimator != "exact":
            return ESTIMATORS[self.config.kl.estimator](logprobs, ref_logprobs)
        with self.autocast():
            ref_logits = self.reference_logits(packed)
        return exact_kl(logits, ref_logits, self.sampling.temperature)

    def explained_variance(self, rollout: RolloutBatch, targets: Targets) -> float:
        """1 - var(returns - values) / var(returns), over the global batch."""
        mask, reduce = rollout.mask, self.sum_over_processes

        def variance(x: Tensor) -> Tensor:
            return masked_mean((x - masked_mean(x, mask, reduce=reduce)) ** 2, mask, reduce=reduce)

        return float(1 - variance(targets.returns - rollout.values) / variance(targets.returns).clamp_min(1e-8))

    # ------------------------------------------------------------------ the belt

    @property
    def ceiling(self) -> float | None:
        """Nats in the target's unit above which an update is cut; None = no ceiling."""
        return self.config.kl.ceiling_value

    @property
    def backtracks(self) -> bool:
        """Whether an update that goes above it is shortened."""
        section = self.config.kl.ceiling
        return section is not None and self.ceiling is not None and section.action == "backtrack"

    def hold_ceiling(self, rollout: RolloutBatch, before: list[Tensor], kl_start: float) -> Cut:
        """Shorten the update where the next rollout's KL is forecast above the ceiling."""
        if self.ceiling is None or not self.backtracks:
            kl = self.kl_now(rollout) if self.controller.needs_update_kl else float("nan")
            return Cut(1.0, kl_start, kl, kl)
        limit = self.ceiling / self.forecast.ratio
        cut = shorten_update(
            self.trained,
            before,
            lambda: self.kl_now(rollout),
            kl_start,
            limit,
            lambda: self.descend_kl(rollout),
        )
        self.forecast.predicted = cut.kl_after
        return cut

    def kl_now(self, rollout: RolloutBatch) -> float:
        """Exact KL in the target's unit, of the model as it is, at the rollout's states, over all processes."""
        with self.autocast():
            kl = exact_kl_now(self.core, self.reference_logits, rollout, self.sampling.temperature)
        count = rollout.mask.sum() if self.config.kl.unit == "token" else rollout.mask.any(1).sum()
        total, count = self.sum_over_processes(torch.stack([kl.double().sum(), count.double()])).tolist()
        return float(total / count)

    def descend_kl(self, rollout: RolloutBatch) -> None:
        """One gradient step on the exact KL at the rollout's states, of the length of a usual update."""
        tokens = float(self.sum_over_processes(rollout.mask.sum().double()))
        for packed in self.training_passes(rollout, torch.arange(len(rollout)), self.microbatch.rows):
            with self.autocast():
                logits, values = self.model(packed.ids, packed.mask, packed.states, packed.prefixes)
                ref_logits = self.reference_logits(packed)
            kl = exact_kl(logits, ref_logits, self.sampling.temperature).sum()
            if values is not None:
                kl = kl + 0.0 * values.sum()  # keeps every tensor in the graph for DDP
            self.accelerator.backward(kl * (self.world / tokens))
        grads = [p.grad for p in self.trained]
        norm = torch.sqrt(sum((g.double().square().sum() for g in grads if g is not None), torch.zeros(()).double()))
        size = torch.sqrt(torch.tensor(float(sum(p.numel() for p in self.trained))))
        rate = 4 * self.config.ppo.epochs * self.config.ppo.learning_rate * float(size) / max(float(norm), 1e-12)
        with torch.no_grad():
            for p, g in zip(self.trained, grads, strict=True):
                if g is not None:
                    p.sub_(rate * g)
        self.optimizer.zero_grad()

    # ------------------------------------------------------------------ processes

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 where the run asks for it."""
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    @contextlib.contextmanager
    def no_sync(self, *, last: bool) -> Iterator[None]:
        """Gradients travel between processes once a minibatch, with its last microbatch."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return x if self.world == 1 else self.accelerator.reduce(x, reduction="sum")

    def max_over_processes(self, x: Tensor) -> Tensor:
        """The largest value of a scalar over all processes."""
        return x if self.world == 1 else self.accelerator.gather(x.reshape(1)).max()

    def spread(self, value: float) -> float:
        """Largest minus smallest of a number over processes."""
        if self.world == 1:
            return 0.0
        every = self.accelerator.gather(torch.tensor([value], dtype=torch.float64, device=self.accelerator.device))
        return float(every.max() - every.min())

    def gather(self, rollout: RolloutBatch, gold: list[float] | None) -> Gathered:
        """What the metrics are made from, of the global batch."""
        device = rollout.mask.device
        gold_tensor = torch.tensor(gold if gold is not None else [0.0] * len(rollout), device=device)
        fields = [
            rollout.exact_kl,
            rollout.logprobs,
            rollout.ref_logprobs,
            rollout.entropy,
            rollout.mask.float(),
            rollout.scores,
            rollout.shaped_scores,
            gold_tensor,
            rollout.ended.float(),
        ]
        if self.world > 1:
            fields = [self.accelerator.pad_across_processes(f, dim=1) if f.dim() > 1 else f for f in fields]
            fields = [self.accelerator.gather(f) for f in fields]
        kl, logprobs, ref_logprobs, entropy, mask, scores, shaped, golds, ended = (f.float().cpu() for f in fields)
        return Gathered(
            exact_kl=kl,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            mask=mask.bool(),
            scores=scores,
            shaped_scores=shaped,
            gold=golds if gold is not None else None,
            ended=ended.bool(),
        )

    # ------------------------------------------------------------------ state

    @property
    def compiled(self) -> int:
        """Numbers in a vector of the compiled functions, by which sums are ordered; 0 = there are none."""
        found = library() if self.accelerator.device.type == "cpu" else None
        return int(found.lanes()) if found is not None else 0

    def state_dict(self) -> dict[str, Any]:
        """State besides tensors, JSON-able."""
        return {
            "controller": self.controller.state_dict(),
            "shaping": self.shaping.state_dict(),
            "forecast": self.forecast.state_dict(),
            "microbatch": self.microbatch.halved,
            "decoding_agrees": self.decoding_agrees,
            "compiled": self.compiled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the optimizer and the weights are loaded beside it."""
        self.controller.load_state_dict(state["controller"])
        self.shaping = ScoreShaping(**state["shaping"])
        self.forecast.load_state_dict(state["forecast"])
        self.microbatch.halve_to(state["microbatch"])
        self.decoding_agrees = state.get("decoding_agrees")  # near its limit, other weights would say otherwise
        if state.get("compiled", 0) != self.compiled:
            self.notes.append(
                "other-functions: this run began with other compiled functions, or without them, "
                "so it is not to the last bit what it would have been"
            )


def most_tokens_of_a_pass(config: TrainConfig, model: ActorCritic, device: torch.device) -> int | None:
    """Tokens in a training pass, at most, where the config leaves open how many rows it has; else None."""
    if config.ppo.microbatch_size is not None:
        return None
    trunks = [trunk for trunk in (model.policy, model.value_trunk) if trunk is not None]
    return tokens_of_a_pass(trunks, device, config.run.dtype)


def keep_from_ddp(model: ActorCritic) -> None:
    """DDP waits for the gradient of everything it holds; the critic is fitted apart and sums its own."""
    if model.critic is not None:
        names = [f"critic.{name}" for name, _ in model.critic.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
