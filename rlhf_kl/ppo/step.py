"""PPO with a KL penalty to a frozen reference. Source: Ziegler et al. 2019 (1909.08593); Schulman et al. 2017."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.control import Guard
from rlhf_kl.control.ceiling import Ceiling, CeilingResult
from rlhf_kl.control.rate import LearningRate, PacedRate, Progress, allowed_rise
from rlhf_kl.control.way import Way
from rlhf_kl.events import Event, UpdateSkipped
from rlhf_kl.gradients import scale_for
from rlhf_kl.memory import free_memory, memory_for, smaller_pass, tokens_of_a_pass
from rlhf_kl.models.value import freezing
from rlhf_kl.ops.head import token_kl, token_logprobs
from rlhf_kl.ops.kl import ESTIMATORS
from rlhf_kl.ops.masked import Mean
from rlhf_kl.ops.packing import Layout, Packed, split_groups
from rlhf_kl.optim import fit_critic, lr_factor, set_learning_rate
from rlhf_kl.ppo.objectives import Loss, Tokens, explained_variance, ppo_loss, ppo_targets
from rlhf_kl.ppo.rollout import Rollouts, exact_kl_now, unusable
from rlhf_kl.ppo.settings import PPOSettings
from rlhf_kl.ppo.states import StateFeatures
from rlhf_kl.seeding import uniforms
from rlhf_kl.sharding import is_sharded, local, sum_gradients
from rlhf_kl.types import RolloutBatch

WHOLE = 4  # times the size of the whole gradients must be free to keep them between microbatches
ENOUGH = 16  # responses for the change of the KL in an update


@dataclass(frozen=True)
class OptimizerStep:
    """One step of the optimizer, or one that was left out since its gradient is not finite."""

    loss: Loss  # of its minibatch, in numbers
    weight: float  # of all tokens of the minibatch
    norm: float  # of the gradient


@dataclass
class Update:
    """One update: the row of metrics, the alarms and the samples are made from it."""

    rollout: RolloutBatch
    coef: float  # beta of this update
    coef_next: float
    learning_rate: float
    steps: list[OptimizerStep] = field(default_factory=list)
    loss_scale: float | None = None  # of a float16 run, after the update
    overflows: int = 0  # steps that were left out since it was too large
    kl_at_stop: float = 0.0  # KL to the policy that sampled, where the update ended before a step that is too far
    critic_loss: float | None = None  # of a critic on features, before its fit
    explained_variance: float = math.nan  # of the returns, by the values of the rollout
    move: CeilingResult = field(default_factory=CeilingResult)
    events: list[Event] = field(default_factory=list)  # for the monitors

    @property
    def taken(self) -> list[OptimizerStep]:
        """The steps whose gradient was finite."""
        return [step for step in self.steps if math.isfinite(step.norm)]

    @property
    def broken(self) -> bool:
        """Whether a step was left out for another reason than the scale of its loss."""
        left_out = [step.loss for step in self.steps if not math.isfinite(step.norm)]
        return len(left_out) > self.overflows or any(not math.isfinite(loss.policy + loss.value) for loss in left_out)

    def mean(self, figure: str) -> float:
        """Mean of a figure of the loss over the tokens of the steps that were taken; NaN without any."""
        if not self.taken:
            return math.nan
        loss: float = getattr(Loss.total([step.loss for step in self.taken]), figure)
        return loss / sum(step.weight for step in self.taken)

    def skip(self, figure: str) -> None:
        """Tell the monitors that a step was left out, since this figure was not finite."""
        self.events.append(UpdateSkipped(f"{figure} was not finite"))


class PPOTrainer:
    """The PPO algorithm. It builds no objects, prints nothing and opens no file."""

    def __init__(
        self,
        settings: PPOSettings,
        rollouts: Rollouts,
        optimizer: torch.optim.Optimizer,
        controller: Guard,
        start: Mean | None = None,
        way: Way | None = None,
    ) -> None:
        """The optimizer comes with the peak learning rate. `start`: the shaped score of the reference.

        `way`: from the reference to the policy, where it is known.
        """
        self.settings, self.rollouts, self.optimizer, self.controller = settings, rollouts, optimizer, controller
        self.model, self.ranks = rollouts.model, rollouts.ranks
        self.reference = rollouts.reference  # holds the states of the last rollout
        self.features = rollouts.features  # of the critic, if there is one
        model = self.model
        self.policy = [p for p in model.policy.parameters() if p.requires_grad]
        self.trained = model.trained  # the policy, and a value function that learns in its loss
        self.sharded = any(map(is_sharded, self.trained))
        self.scale = scale_for(settings.dtype, model.policy.device)
        # Several microbatches of sharded weights: whole gradients take memory, summing each time takes messages.
        whole = sum(p.numel() * p.element_size() for p in self.trained if is_sharded(p))
        self.sums_once = all(self.ranks.all(WHOLE * whole < free_memory(model.policy.device)))
        self.rows = settings.microbatch_size or settings.minibatch_size  # of a pass, at most
        peak, first = float(optimizer.param_groups[0]["lr"]), settings.value_warmup + 1
        paced = PacedRate(settings.target, settings.updates, first) if settings.lr_schedule == "adaptive" else None
        schedule = partial(lr_factor, settings.lr_schedule)
        self.rate = LearningRate(controller, peak, schedule, settings.updates, paced)
        self.progress = Progress(start)
        self.ceiling = Ceiling(
            [local(p) for p in self.policy],
            way,
            target=settings.target,
            limit=settings.ceiling if settings.backtracks else None,
            measures=controller.needs_update_kl or self.rate.adaptive is not None,
        )

    def update(self, step: int, rollout: RolloutBatch | None = None) -> Update:
        """Update number `step` (from 1). With a rollout that cannot be trained on nothing changes.

        `rollout`: the one that was made last; None: it is made now.
        """
        rollout = (
            self.rollouts(step) if rollout is None else rollout
        )  # 1. y ~ pi(.|x); scores, log pi, log ref, V, exact KL
        coef, unit = self.controller.beta, self.settings.unit
        if (left_out := unusable(rollout)) is not None:
            return Update(rollout, coef, coef, math.nan, events=[left_out])
        kl = rollout.kl(unit)
        targets = ppo_targets(rollout, coef, self.settings)  # 2. r_t = -beta KL_t + 1[t = T] score  3. GAE, RLOO, GRPO
        before = self.ceiling.snapshot()
        update = Update(rollout, coef, coef, math.nan, move=CeilingResult(1.0, kl.mean, kl.mean, kl.mean))
        trains = step > self.settings.value_warmup  # while the policy is frozen, its KL does not depend on beta
        if trains:
            if self.controller.adjusts:  # else nothing is moved that could stop
                distance = math.sqrt(kl.mean / self.settings.target)
                most = allowed_rise(rollout.score_spread(), rollout.kl("sequence").mean)
                update.events += self.progress.observe(rollout.score(), distance, most)
            update.events += self.rate.choose(step, kl.mean, progress=self.progress.made)  # 4. pace the way by the rate
        update.learning_rate = self.rate(step)
        self.optimize(update, targets, step)  # 5. epochs of clipped steps
        if trains:
            read_kl = partial(self.kl_now, rollout)
            move = update.move = self.ceiling.hold(read_kl, before, kl)  # shortened if it would cross the ceiling
            tokens = rollout.tokens_per(unit)
            update_kl = max(update.mean("approx_kl"), update.kl_at_stop) * tokens  # NaN if no step was taken
            update.events += self.rate.observe(step, move, update_kl, tokens)
            seen, made = self.ceiling.seen(move), self.progress.made
            update.events += self.controller.step(kl.mean, len(rollout), seen, progress=made)  # 6. move beta
            update.coef_next = self.controller.beta
            if self.ceiling.way is not None:  # 7. end an overshoot at once
                update.move = self.ceiling.scale(read_kl, move, self.controller.distance_kept())
        return update

    def optimize(self, update: Update, targets: Tokens, step: int) -> None:
        """Several epochs of clipped minibatch steps; then the fit of a critic on features, if there is one."""
        cfg, rollout = self.settings, update.rollout
        tokens = targets.flat(rollout.device)
        set_learning_rate(self.optimizer, update.learning_rate)
        made: list[tuple[Tensor, Tensor]] = []  # of each step, read at the end: reading waits for a GPU
        weights: list[float] = []
        with freezing(self.policy if step <= cfg.value_warmup else []):
            for rows in self.minibatches(step):
                weight = float(targets.weights[rows].sum())
                if not weight:
                    continue  # nothing to learn from
                loss = self.backward(rollout.layout, tokens, rows, weight)
                if cfg.max_update_kl is not None:
                    ((found, _),) = self.read([(loss, loss[:1])])
                    if found.approx_kl > cfg.max_update_kl * weight:
                        update.kl_at_stop = found.approx_kl / weight
                        self.ranks.drop(self.optimizer, self.trained)
                        break
                made.append((loss, self.ranks.step(self.optimizer, self.trained, cfg.max_grad_norm, self.scale)))
                weights.append(weight)
        update.steps = [
            OptimizerStep(loss, weight, norm) for weight, (loss, norm) in zip(weights, self.read(made), strict=True)
        ]
        if self.scale is not None:
            update.loss_scale, update.overflows = self.scale.read()
        if update.broken:
            update.skip("a gradient")
        if self.features is not None:
            update.critic_loss, finite = self.fit_critic(self.features, rollout, targets, step)
            if not finite:
                update.skip("the loss of the value function")
        if cfg.critic:
            update.explained_variance = explained_variance(targets)

    def read(self, steps: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Loss, float]]:
        """Figures of the losses of all processes, and norms of their gradient, in numbers; all by one transfer."""
        if not steps:
            return []
        figures = self.ranks.gather(torch.stack([torch.cat([loss, norm.to(loss).view(1)]) for loss, norm in steps]))
        return [(Loss(*Loss.joined(each[:, :-1]).tolist()), float(each[0, -1])) for each in figures.unbind(1)]

    def backward(self, layout: Layout, tokens: Tokens, rows: Tensor, weight: float) -> Tensor:
        """The gradients of one minibatch: `rows` of the batch, whose tokens have the sum of weights `weight`.

        Returns the figures of this process's `Loss`: (5,).
        """
        passes, microbatches = [], list(self.passes(layout, self.ranks.mine(rows).tolist()))
        for packed in microbatches:
            last = packed is microbatches[-1]
            if self.sharded:
                modules = [self.model.policy, *([] if self.model.value is None else [self.model.value])]
                sum_gradients(modules, last or not self.sums_once)
            with memory_for(f"a training pass of {len(packed.ids)} rows does not fit", smaller_pass("ppo")):
                loss = self.loss(tokens.at(packed.places), packed)
                # Token sums over the *global* count, so that microbatches of unequal length weigh right.
                total = (self.settings.vf_coef * loss.value + loss.policy) / weight
                with self.ranks.sending(self.trained, last=last):
                    (total if self.scale is None else self.scale(total)).backward()
            passes.append(loss.detached())
        return Loss.joined(torch.stack(passes))

    def loss(self, x: Tokens, rows: Packed) -> Loss:
        """One forward pass: the loss summed over its tokens."""
        model, cfg = self.model, self.settings
        hidden = model.policy(rows)
        head = model.policy.head()
        if x.kl_weight and cfg.estimator == "exact":
            ref = self.reference.at(rows.numbers)
            logprobs, penalty = token_kl(hidden, head, x.ids, ref, self.reference.head(), cfg.temperature)
        else:
            logprobs = token_logprobs(hidden, head, x.ids, cfg.temperature)
            penalty = ESTIMATORS[cfg.estimator](logprobs, x.ref_logprobs) if x.kl_weight else torch.zeros_like(logprobs)
        values = None if model.value is None else model.value(rows, hidden)
        return ppo_loss(x, logprobs, penalty, values, cfg)

    def minibatches(self, step: int) -> Iterator[Tensor]:
        """The rows of every minibatch of an update, epoch after epoch, each in an order of its own.

        Responses to one prompt stay together where a minibatch holds whole groups of them, so that a pass reads the
        prompt once. Each minibatch has one group (or row) from every few neighbours in the batch. So all ranks have
        equally many of its rows, and the minibatches are the same on any number of ranks.
        """
        cfg = self.settings
        if self.features is not None and step <= cfg.value_warmup:
            return  # the critic is not trained in the policy's epochs
        size, together = cfg.minibatch_size, cfg.rows_together
        several = cfg.batch_size // size
        neighbours = several * torch.arange(size // together).unsqueeze(1)
        for epoch in range(cfg.epochs):
            order = uniforms(len(neighbours), several, cfg.seed, "minibatches", step, epoch).argsort(1)
            for groups in (order + neighbours).unbind(1):
                yield (groups.unsqueeze(1) * together + torch.arange(together)).flatten()

    def kl_now(self, rollout: RolloutBatch, whole: bool) -> Mean:
        """Mean KL of the current policy at the rollout's states: that of the rollout, and the change since then.

        Unless `whole`, the change is read at half of the prompts, where these have ENOUGH responses: before and after
        at the same states, so it varies much less than the KL.
        """
        unit = self.settings.unit
        mine = self.ranks.mine(range(len(rollout)))
        half = [row for row in range(len(rollout)) if row // rollout.group % 2 == 0]
        rows = range(len(rollout)) if whole or len(half) < ENOUGH else half
        read = [row for row in rows if row in mine]
        kl = exact_kl_now(self.model.policy, self.reference, rollout, self.settings.temperature, read)
        before = rollout.kl(unit)
        change = rollout.mean(self.ranks.sum(kl) - rollout.exact_kl, unit, rows)
        after = before.mean + change.mean  # can be below 0, by its error
        return Mean(0.0 if after < 0.0 else after, math.hypot(before.stderr, change.stderr))

    def passes(self, layout: Layout, rows: list[int]) -> Iterator[Packed]:
        """These rows in microbatches of near-equal length."""
        cfg, most = self.settings, 1 << 40
        models = 2 if cfg.critic == "separate" else 1  # the value function is about as large
        if cfg.microbatch_size is None:
            most = tokens_of_a_pass(self.model.policy.module, layout.device, cfg.dtype, models=models)
        if self.sharded:  # the ranks gather each layer together, so all make equally many passes
            groups = layout.groups(rows, most_rows=self.rows, most_tokens=most)
            yield from map(layout.pack, split_groups(groups, int(self.ranks.gather(torch.tensor(len(groups))).max())))
            return
        # Layers that recompute their activations keep no keys and values that rows could share.
        share = self.model.policy.shares_prompts and not cfg.recomputes
        yield from layout.passes(rows, most_rows=self.rows, most_tokens=most, share=share)

    # ---- the critic on features

    def fit_critic(
        self, features: StateFeatures, rollout: RolloutBatch, targets: Tokens, step: int
    ) -> tuple[float, bool]:
        """Fit the critic to the returns of this rollout; returns its loss before that, and whether all was finite."""
        mine = self.ranks.mine(range(len(rollout)))
        rows = slice(mine.start, mine.stop)
        mask, learned = rollout.mask[rows], targets.weights[rows] > 0
        known = learned[mask]
        return fit_critic(
            features.critic,
            self.optimizer,
            features.kept if bool(known.all()) else features.kept[known.to(features.kept.device)],
            targets.returns[rows][learned].to(features.kept),
            epochs=self.settings.critic_epochs,
            seed=self.settings.seed,
            step=step,
            ranks=self.ranks,
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """State besides tensors, JSON-able."""
        return {
            "rate": self.rate.state_dict(),
            "controller": self.controller.save(),
            "ceiling": self.ceiling.forecast.state_dict(),
            "progress": self.progress.state_dict(),
            **({} if self.scale is None else {"scale": self.scale.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the optimizer and the weights are loaded beside it."""
        self.rate.load_state_dict(state["rate"])
        self.controller.restore(state["controller"])
        self.ceiling.forecast.load_state_dict(state["ceiling"])
        self.progress.load_state_dict(state["progress"])
        if self.scale is not None:
            self.scale.load_state_dict(state["scale"])
