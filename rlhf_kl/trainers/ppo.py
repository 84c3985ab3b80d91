"""PPO with a KL penalty to a frozen reference. Source: Ziegler et al. 2019 (1909.08593); Schulman et al. 2017."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.kl_controllers import GuardedController
from rlhf_kl.models.activations import tokens_of_a_pass
from rlhf_kl.models.logits import Logits
from rlhf_kl.models.value import ActorCritic, values_in
from rlhf_kl.ops.float64 import float64
from rlhf_kl.ops.masked import masked_mean
from rlhf_kl.ops.packing import Packed
from rlhf_kl.processes import Processes
from rlhf_kl.rollout.collect import exact_kl_now
from rlhf_kl.rollout.features import StateFeatures
from rlhf_kl.rollout.reference import ReferenceStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.sharding import is_spread, part_of, whole
from rlhf_kl.trainers.ceiling import Ceiling, CeilingResult, KLReading
from rlhf_kl.trainers.critic import fit_critic
from rlhf_kl.trainers.guards import UNSCORED, Microbatch, NonFiniteRollout, non_finite_figure
from rlhf_kl.trainers.objectives import Losses, Targets, ppo_losses, ppo_targets
from rlhf_kl.trainers.optim import lr_factor, set_learning_rate
from rlhf_kl.trainers.step_size import StepSize
from rlhf_kl.types import RolloutBatch

LOSSES = ("policy_loss", "value_loss", "approx_kl", "clipped")


@dataclass(frozen=True)
class Update:
    """One update: the row of metrics, the alerts and the samples are made from it."""

    rollout: RolloutBatch
    coef: float  # beta of this update
    coef_next: float
    losses: dict[str, Any]  # by their key in the row
    ceiling: CeilingResult
    alerts: list[str]
    skipped: str | None = None  # the non-finite figure, if steps were skipped


class PPOTrainer:
    """The PPO algorithm. It builds no objects, prints nothing and opens no file."""

    def __init__(
        self,
        config: TrainConfig,
        model: ActorCritic,
        optimizer: torch.optim.Optimizer,
        rollouts: Callable[[int], RolloutBatch],
        reference: ReferenceStates,
        controller: GuardedController,
        features: StateFeatures | None = None,
        processes: Processes | None = None,
        spread: Sequence[nn.Module] = (),
    ) -> None:
        """`reference` holds the states of the last rollout; `features` are those of the critic, if there is one.

        The optimizer comes with the peak learning rate. `spread`: models whose weights the processes share.
        """
        self.config, self.model, self.optimizer, self.rollouts = config, model, optimizer, rollouts
        self.reference, self.controller, self.features = reference, controller, features
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        self.processes = processes or Processes()
        self.spread = spread
        self.passes_agree = any(map(is_spread, model.trained))
        self.microbatch = Microbatch(config.ppo.microbatch_size or config.minibatch_size)
        adaptive = config.ppo.lr_schedule == "adaptive" and controller.adjusts
        self.farthest = 0.0  # KL to the policy that sampled, when an update was stopped early
        self.step_size = StepSize(config.kl.target_value, config.updates) if adaptive else None
        section = config.kl.ceiling
        self.ceiling = Ceiling(
            [part_of(p) for p in model.policy.parameters() if p.requires_grad],
            values_in(reference.lm, model.policy),
            self.kl_now,
            limit=config.kl.ceiling_value if section is not None and section.action == "backtrack" else None,
            measures=controller.needs_update_kl or adaptive,
        )

    def update(self, step: int) -> Update:
        """Update number `step` (from 1). Errors: NonFiniteRollout, before anything has changed."""
        # 1. y ~ pi(.|x), scores, log pi, log ref, V
        with whole(*self.spread):
            rollout = self.processes.together(lambda: self.rollouts(step))
        figure = self.processes.agree(non_finite_figure(rollout))
        if not any(self.processes.all(bool(rollout.scored.any()))):
            figure = UNSCORED
        if figure is not None:
            raise NonFiniteRollout(figure, rollout)
        coef = self.controller.coef
        targets = ppo_targets(rollout, coef, self.config, self.processes.sum)  # 2. r_t = -beta KL_t + score  3. GAE
        before = self.ceiling.snapshot()
        losses, skipped = self.optimize(rollout, targets, step)  # 4. clipped epochs
        kl = self.mean_kl(rollout.exact_kl, rollout.mask)
        result, alerts = CeilingResult(1.0, kl.mean, kl.mean, kl.mean), []
        if step > self.config.ppo.value_warmup:  # while the policy is frozen, its KL does not depend on beta
            result = self.ceiling.hold(rollout, before, kl)
            self.controller.observe_update(result.kl_before, result.kl_after, result.kl_uncut)
            alerts = self.controller.update(kl.mean, self.config.rollout.batch_size)  # 5. move beta toward the target
            moved = max(self.farthest, losses["policy/approx_kl"]) * self.unit_size(rollout)
            alerts += self.adapt_rate(step, result, moved, self.controller.coef / coef if coef else 1.0)
        alerts += dict.fromkeys(note for notes in self.processes.all(self.microbatch.alerts()) for note in notes)
        return Update(rollout, coef, self.controller.coef, losses, result, alerts, skipped)

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`."""
        factor = lr_factor(self.config.ppo.lr_schedule, (step - 1) / self.config.updates)
        return self.learning_rate * factor * (1.0 if self.step_size is None else self.step_size.factor)

    def unit_size(self, rollout: RolloutBatch) -> float:
        """Tokens in a unit of the target: 1, or the mean length of a response."""
        if self.config.kl.unit == "token":
            return 1.0
        return float(self.processes.sum(float64(rollout.mask.sum()))) / self.config.rollout.batch_size

    def adapt_rate(self, step: int, result: CeilingResult, moved: float, growth: float) -> list[str]:
        """Choose the rate of the next update, and pass it to the controller; returns the alerts of `StepSize`."""
        before, alerts = self.rate(step), []
        if self.step_size is not None:
            cut = result.factor < 1.0
            spent = self.controller.spent
            alert = self.step_size.observe(
                step, result.kl_before, result.kl_uncut, moved=moved, cut=cut, spent=spent, growth=growth
            )
            alerts += [alert] if alert else []
        self.controller.observe_rate(self.rate(step + 1) / before)
        return alerts

    # ---- epochs

    def optimize(self, rollout: RolloutBatch, targets: Targets, step: int) -> tuple[dict[str, Any], str | None]:
        """Several epochs of clipped minibatch updates: means over what was trained on, and what was skipped."""
        cfg = self.config.ppo
        set_learning_rate(self.optimizer, self.rate(step))
        totals = dict.fromkeys((*LOSSES, "grad_norm", "steps", "tokens"), 0.0)
        first_max, skipped, done = math.nan, None, 0
        self.farthest = 0.0
        learning = self.features is None or step > cfg.value_warmup  # a critic is not trained in the policy's epochs
        plan = list(self.minibatches(step)) if learning else []
        weights = [targets.weights[rows].sum() for rows in plan]
        counts = self.processes.sum(float64(torch.stack(weights))).tolist() if plan else []
        for rows, tokens in zip(plan, counts, strict=True):
            if not tokens:
                continue  # nothing to learn from
            sums, largest, norm = self.minibatch(rollout, targets, rows, tokens, step)
            if norm is None:
                self.farthest = sums["approx_kl"] / sums["tokens"]
                break
            first_max = largest if done == 0 else first_max
            done += 1
            if not math.isfinite(norm):
                skipped = "a gradient"
                continue
            for name, value in {**sums, "grad_norm": norm, "steps": 1.0}.items():
                totals[name] += value
        means = {name: totals[name] / totals["tokens"] if totals["tokens"] else math.nan for name in LOSSES}
        if self.features is not None:
            means["value_loss"], finite = self.fit_critic(self.features, rollout, targets, step)
            skipped = skipped if finite else "the loss of the value function"
        return {
            "policy/loss": means["policy_loss"],
            "policy/approx_kl": means["approx_kl"],
            "policy/clip_fraction": means["clipped"],
            "policy/logratio_first_max": first_max,
            "policy/grad_norm": totals["grad_norm"] / totals["steps"] if totals["steps"] else math.nan,
            "policy/learning_rate": self.optimizer.param_groups[0]["lr"],
            "policy/epochs": done * self.config.minibatch_size / self.config.rollout.batch_size,
            "value/loss": means["value_loss"] if self.config.critic else math.nan,
            "value/explained_variance": self.explained_variance(rollout, targets),
        }, skipped

    def minibatches(self, step: int) -> Iterator[Tensor]:
        """The rows of every minibatch of an update, epoch after epoch, each in an order of its own.

        Each minibatch has one row from every few neighbours in the global batch. So all processes have equally many of
        its rows, and the minibatches are the same on any number of processes.
        """
        size, here = self.config.minibatch_size, self.processes.rows(self.config.rollout.batch_size)
        several = self.config.rollout.batch_size // size
        for epoch in range(self.config.ppo.epochs):
            order = uniforms(size, several, self.config.run.seed, "minibatches", step, epoch).argsort(1)
            for rows in (order + several * torch.arange(size).unsqueeze(1)).unbind(1):
                yield rows[(rows >= here.start) & (rows < here.stop)] - here.start

    def minibatch(
        self, rollout: RolloutBatch, targets: Targets, rows: Tensor, tokens: float, step: int
    ) -> tuple[dict[str, float], float, float | None]:
        """One optimizer step: sums over the global minibatch, the largest |log ratio|, and the gradient's norm.

        `rows`: of the minibatch, those of this process; `tokens`: the weight of all of its tokens.

        A step with a non-finite gradient is skipped. So is a step of a policy that is further than
        `ppo.max_update_kl` from the one that sampled; its norm is None.
        """
        cfg, device, together = self.config.ppo, rollout.mask.device, self.processes

        def accumulate(size: int) -> tuple[list[float], float]:
            pieces = list(self.training_passes(rollout, rows, size))
            self.microbatch.largest = max(len(piece.ids) for piece in pieces)
            sums, largest = float64(torch.zeros(4, device=device)), torch.zeros((), device=device)
            # Passes with zero weight, so that all processes gather the layers equally often.
            idle = max(together.all(len(pieces))) - len(pieces) if self.passes_agree else 0
            for piece, weight in [*((piece, 1.0) for piece in pieces), *[(pieces[0], 0.0)] * idle]:
                losses = self.losses(rollout, targets, piece)
                loss = cfg.vf_coef * losses.value + (losses.policy if step > cfg.value_warmup else 0.0)
                # Token sums over the *global* count, so that microbatches of unequal length weigh right.
                (weight * loss / tokens).backward()
                sums += weight * torch.stack([float64(x.detach()) for x in losses[:4]])
                largest = torch.maximum(largest, losses.max_logratio)
            return sums.tolist(), float(largest)

        if self.passes_agree:  # if memory is full on one process, the others wait for its pass: all stop
            outcomes = together.all((*accumulate(self.microbatch.rows), self.microbatch.rows))
        else:
            fitted = partial(self.microbatch.fit, accumulate, self.optimizer.zero_grad)
            outcomes = together.results(lambda: (*fitted(), self.microbatch.rows))
        sums, ratios, sizes = zip(*outcomes, strict=True)
        self.microbatch.halve_to(min(sizes))
        figures = {**dict(zip(LOSSES, map(sum, zip(*sums, strict=True)), strict=True)), "tokens": tokens}
        largest_ratio = max(ratios)
        if cfg.max_update_kl is not None and figures["approx_kl"] > cfg.max_update_kl * tokens:
            self.optimizer.zero_grad()
            return figures, largest_ratio, None
        moved = self.model.trained
        if step <= cfg.value_warmup and self.model.value is not None:  # a head's gradient goes through the policy
            for parameter in self.model.policy.parameters():
                parameter.grad = None
            moved = list(self.model.value.parameters())
        self.processes.sum_gradients(moved)
        norm = self.processes.clip_gradients(self.model.trained, cfg.max_grad_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return figures, largest_ratio, norm

    def losses(self, rollout: RolloutBatch, targets: Targets, rows: Packed) -> Losses:
        """Losses of one microbatch, summed over its tokens: one forward pass of the policy."""
        model, reference = self.model, self.reference

        def use(logits: Logits, hidden: Tensor) -> Losses:
            values = None if model.value is None else model.value(rows, hidden)
            return ppo_losses(rollout, targets, rows, logits, values, self.config, reference.logits)

        return model.policy.states(rows, use)

    def training_passes(self, rollout: RolloutBatch, rows: Tensor, size: int) -> Iterator[Packed]:
        """The rows of a minibatch in microbatches of at most `size` rows and near-equal length."""
        device, most = rollout.mask.device, 1 << 40
        if self.config.ppo.microbatch_size is None:
            models = 2 if self.config.critic == "separate" else 1  # the value function is about as large
            most = tokens_of_a_pass(self.model.policy.module, device, self.config.run.dtype, models=models)
        # Layers that recompute their activations keep no keys and values that rows could share; of those that are
        # gathered for a pass, every process goes through each as often.
        share = not self.config.policy.gradient_checkpointing and not self.passes_agree
        return rollout.layout.passes(rows.tolist(), most_rows=size, most_tokens=most, share=share)

    def fit_critic(
        self, features: StateFeatures, rollout: RolloutBatch, targets: Targets, step: int
    ) -> tuple[float, bool]:
        """Fit the critic to the returns of this rollout; returns its loss before that, and whether all was finite."""
        returns, kept = targets.returns[rollout.mask], features.kept
        if not bool(rollout.scored.all()):
            learned = targets.weights[rollout.mask] > 0
            returns, kept = returns[learned], kept[learned]
        return fit_critic(
            features.critic,
            self.optimizer,
            kept,
            returns,
            epochs=self.config.ppo.critic_epochs,
            seed=self.config.run.seed,
            step=step,
            processes=self.processes,
        )

    def explained_variance(self, rollout: RolloutBatch, targets: Targets) -> float:
        """1 - var(returns - values) / var(returns), over the global batch; nan without a critic."""
        if self.config.critic is None:
            return math.nan
        mask, reduce = targets.weights.bool(), self.processes.sum

        def variance(x: Tensor) -> Tensor:
            return masked_mean((x - masked_mean(x, mask, reduce=reduce)) ** 2, mask, reduce=reduce)

        return float(1 - variance(targets.returns - rollout.values) / variance(targets.returns).clamp_min(1e-8))

    # ---- KL

    def mean_kl(self, kl: Tensor, mask: Tensor) -> KLReading:
        """Mean of exact KL (B, T) in the target's unit, over the global batch: nats per token, or per response.

        A ratio estimator: prompts are the independent draws, so the standard error is taken between them.
        """
        each = self.config.rollout.samples_per_prompt
        each = 1 if each == self.config.rollout.batch_size else each  # of a single prompt, its responses are
        sums = float64(torch.where(mask, kl, 0.0)).sum(1).view(-1, each).sum(1)
        sizes = float64(mask.sum(1) if self.config.kl.unit == "token" else mask.any(1)).view(-1, each).sum(1)
        terms = [sums, sizes, sums * sums, sums * sizes, sizes * sizes, torch.ones_like(sums)]
        total, size, square, product, size_square, rows = self.processes.sum(torch.stack(terms).sum(1)).tolist()
        mean = total / size
        residual = max(0.0, square - 2 * mean * product + mean**2 * size_square) * rows / max(1.0, rows - 1)
        return KLReading(mean, math.sqrt(residual) / size)

    def kl_now(self, rollout: RolloutBatch) -> KLReading:
        """Mean KL of the current policy at the rollout's states."""
        with whole(*self.spread):
            kl = exact_kl_now(self.model.policy, self.reference, rollout, self.config.rollout.temperature)
        return self.mean_kl(kl, rollout.mask)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """State besides tensors, JSON-able."""
        return {
            "learning_rate": self.learning_rate,
            "step_size": None if self.step_size is None else self.step_size.state_dict(),
            "controller": self.controller.state_dict(),
            "ceiling": self.ceiling.state_dict(),
            "microbatch": self.microbatch.halved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the optimizer and the weights are loaded beside it."""
        self.learning_rate = state["learning_rate"]
        self.controller.load_state_dict(state["controller"])
        self.ceiling.load_state_dict(state["ceiling"])
        if self.step_size is not None:
            self.step_size.load_state_dict(state["step_size"])
        self.microbatch.halve_to(state["microbatch"])
