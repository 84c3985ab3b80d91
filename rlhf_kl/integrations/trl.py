"""A KL budget for TRL's GRPOTrainer and RLOOTrainer: `KLBudget.attach(trainer, target=0.1)`."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.kl_controllers import GuardedController, build_controller
from rlhf_kl.ops.kl import k3
from rlhf_kl.plugins import is_reference, load_attribute

TESTED = "1.16.0"
FITS = "1.16."  # the trainers' private attributes that are read here may change with any minor version
ESTIMATES = {"GRPOTrainer": "k3", "RLOOTrainer": "k1"}  # of the KL that each logs
UNITS = ("token", "sequence")
logger = logging.getLogger(__name__)
# `adaptive` is fitted to the four optimizer steps of a PPO update. With fewer, Adam's momentum outlasts a rollout.
APPROACH_PER_STEP, MOST_APPROACH = 0.08, 0.3


class KLBudget(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Moves `trainer.beta` after every rollout so that the KL to the reference stays at a target.

    The KL is that of the policy which sampled the rollout, before its first optimizer step, over all processes:
    the mean over the rollout's microbatches of their token means. GRPO: k3 as TRL logs it (`kl`). RLOO: TRL logs
    k1, whose noise would be most of what a controller sees; k3 is computed from the same log-probs and logged
    beside it (`kl_budget/k3`). Both trainers read `beta` at every loss (GRPO) or rollout (RLOO), but `args.beta` only
    at their creation.

    The trainer's trackers log, for each rollout: `kl_budget/kl` and `kl_budget/target` (nats in
    `unit`), `kl_budget/beta` (used in this rollout), `kl_budget/beta_next`. Saved in every checkpoint and restored
    by `trainer.train(resume_from_checkpoint=...)`.
    """

    def __init__(self, trainer: Any, controller: GuardedController, target: float, unit: str, log_only: bool) -> None:
        """Use `attach` instead, which checks its arguments and the trainer."""
        self.trainer, self.controller = trainer, controller
        self.target, self.unit, self.log_only = target, unit, log_only
        self.kl = Entries(trainer, log_k3(trainer) if estimate_of(trainer) == "k1" else "kl")
        self.lengths = Entries(trainer, "completions/mean_length")
        self.rollout_microbatches = trainer.args.steps_per_generation * trainer.num_iterations
        self.window_start = 0  # the first microbatch since the policy changed
        self.fresh: list[float] = []  # KL of microbatches whose policy has not changed since it sampled them
        self.fresh_rollout = 0
        self.length = 0.0
        self.rate: float | None = None  # the learning rate of the last rollout's steps
        self.warned: set[str] = set()

    @classmethod
    def attach(
        cls,
        trainer: Any,
        target: float = 0.1,
        unit: str = "token",
        controller: Any = "adaptive",
        log_only: bool = False,
        **options: Any,
    ) -> KLBudget:
        """Hold the KL of `trainer`, a GRPOTrainer or RLOOTrainer, at `target` nats per `unit`.

        unit: "token" or "sequence" (a token's KL times the mean completion length).
        controller: a built-in's name, "module:Class", "file.py:Class", a class, or an object with `coef` and
            `update(kl, episodes)`. All but an object start at the trainer's beta and take `options`.
        log_only: log the beta that would follow each rollout, without changing the trainer's.
        Raises InputError with every problem and how to fix it.
        """
        if found := problems(trainer, target, unit):
            raise InputError(*found)
        guarded = _build(controller, options, trainer, float(target))
        budget = cls(trainer, guarded, float(target), unit, log_only)
        trainer.add_callback(budget)
        budget._use_coef()
        if trainer.accelerator.is_main_process:
            print(budget.describe(), file=sys.stderr)
        for doubt in doubts(trainer):
            budget._warn(doubt)
        return budget

    def describe(self) -> str:
        """One line: which KL is held at which target, and the bounds of beta."""
        estimate = "k3"
        if self.kl.name == "kl":
            weighted = self.trainer.args.use_bias_correction_kl
            estimate = "k3 as GRPOTrainer logs it" + (", importance weighted" if weighted else "")
        return (
            f"kl-budget: {'watches' if self.log_only else 'holds'} the KL to the reference ({estimate}; fresh samples, "
            f"all processes) at {self.target:g} nats per {self.unit}; beta {self.controller.coef:g}, between "
            f"{self.controller.min_coef:g} and {self.controller.max_coef:g}"
        )

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Restore the saved state, if training resumes from a checkpoint."""
        self.window_start = self.trainer._step
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            if state.global_step:
                self._warn(f"no-state: the checkpoint holds no KL budget; beta starts at {self.controller.coef:g}")
            return
        saved = saved["attributes"]
        if (saved["target"], saved["unit"]) != (self.target, self.unit):
            raise InputError(
                f"kl-budget: the checkpoint held {saved['target']:g} nats per {saved['unit']}, this run has "
                f"{self.target:g} per {self.unit}: attach with the saved target, or start a new run from the weights"
            )
        try:
            self.controller.load_state_dict(saved["controller"])
            self.rate = saved["rate"]
        except ValueError as error:
            raise InputError(f"kl-budget: {error}") from None
        self._use_coef()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._read()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._read()
        self.window_start = self.trainer._step
        rollout = self.window_start // self.rollout_microbatches
        if rollout > self.fresh_rollout:
            if not self.fresh:
                raise InputError(
                    f"kl-budget: {type(self.trainer).__name__} logged no {self.kl.name!r} for a rollout, so there is "
                    "no KL to control: use TRL's GRPOTrainer or RLOOTrainer, or log it in your _compute_loss"
                )
            self._update()
            self.fresh, self.fresh_rollout = [], rollout

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        kept = {"target": self.target, "unit": self.unit, "rate": self.rate}
        return {"args": {}, "attributes": kept | {"controller": self.controller.state_dict()}}

    def _read(self) -> None:
        """Record the KL of the last microbatch, if the policy is still the one that sampled it."""
        last = self.trainer._step - 1
        entries, lengths = self.kl.new(), self.lengths.new()
        if lengths:
            self.length = lengths[-1]
        if last - last % self.rollout_microbatches >= self.window_start:
            self.fresh += entries

    def _update(self) -> None:
        kl = sum(self.fresh) / len(self.fresh) * (self.length if self.unit == "sequence" else 1.0)
        beta = self.trainer.beta
        if self.log_only:  # each proposal starts from the beta that was used
            self.controller.load_state_dict(self.controller.state_dict() | {"coef": beta})
        for alert in self.controller.update(kl, self.trainer.args.generation_batch_size):
            self._warn(alert)
        rate = float(self.trainer.lr_scheduler.get_last_lr()[0])
        if self.rate:
            self.controller.observe_rate(rate / self.rate)
        self.rate = rate
        after = self.controller.coef
        if self.controller.adjusts and after in (self.controller.min_coef, self.controller.max_coef):
            self._warn(f"beta-at-bound: beta {after:g} is at its bound, at a KL of {kl:.4g}")
        figures = {"kl": kl, "target": self.target, "beta": beta, "beta_next": after}
        for name, value in figures.items():
            self.trainer._metrics["train"][f"kl_budget/{name}"].append(value)
        self._use_coef()

    def _use_coef(self) -> None:
        if not self.log_only:
            self.trainer.beta = self.controller.coef

    def _warn(self, message: str) -> None:
        """Warn once per name (the word before the colon)."""
        name = message.partition(":")[0]
        if name not in self.warned and self.trainer.accelerator.is_main_process:
            logger.warning("kl-budget: %s", message)
        self.warned.add(name)


def _build(controller: Any, options: dict[str, Any], trainer: Any, target: float) -> GuardedController:
    """The controller, guarded. Raises InputError."""
    args = trainer.args
    steps = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps  # of a rollout
    try:
        if not isinstance(controller, str | type):
            if options:
                raise ValueError(f"options ({', '.join(options)}) go to a controller's name or class, not to an object")
            return GuardedController(controller)
        kind: str | Callable[..., Any] = controller
        if isinstance(controller, str):
            if controller == "adaptive":
                approach = min(MOST_APPROACH, 1.0 - (1.0 - APPROACH_PER_STEP) ** steps)
                options = {"approach": approach, "down": 0.8, "up": 1.2} | options
            kind = load_attribute(controller) if is_reference(controller) else controller
        rollouts = args.max_steps / steps
        return build_controller(
            kind,
            options,
            target=target,
            coef=float(trainer.beta),
            total_episodes=int(rollouts * args.generation_batch_size) if args.max_steps > 0 else None,
            batch_size=args.generation_batch_size,
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"kl-budget: controller: {error}") from None


class Entries:
    """New values of one of a trainer's training metrics since the last read; the trainer's log clears them."""

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer, self.name = trainer, name
        self.entries: list[float] = []
        self.seen = 0

    def new(self) -> list[float]:
        entries: list[float] = self.trainer._metrics["train"].get(self.name, [])
        if entries is not self.entries:  # the log made a new list
            self.entries, self.seen = entries, 0
        new, self.seen = entries[self.seen :], len(entries)
        return new


def log_k3(trainer: Any) -> str:
    """Make an RLOOTrainer log the token mean of k3 of every rollout too; returns the metric's name.

    The log-probs are those that TRL computes for its penalty: policy, then reference, without gradients.
    """
    name = "kl_budget/k3"
    logprobs: list[torch.Tensor] = []
    inner_logprobs = trainer._get_per_token_logps_and_entropies
    inner_rollout = trainer._generate_and_score_completions

    def get_logprobs(*args: Any, **kwargs: Any) -> Any:
        result = inner_logprobs(*args, **kwargs)
        if not torch.is_grad_enabled():
            logprobs.append(result[0])
        return result

    def rollout(inputs: Any) -> Any:
        logprobs.clear()
        output = inner_rollout(inputs)
        if len(logprobs) == 2:
            policy, reference = logprobs
            mask = output["completion_mask"]
            figures = torch.stack([(k3(policy, reference) * mask).sum(), mask.sum().float()])
            total, tokens = trainer.accelerator.reduce(figures, reduction="sum").tolist()
            mode = "train" if trainer.model.training else "eval"
            trainer._metrics[mode][name].append(total / max(tokens, 1.0))
        logprobs.clear()
        return output

    trainer._get_per_token_logps_and_entropies = get_logprobs
    trainer._generate_and_score_completions = rollout
    return name


# ---- what stands in the way


def estimate_of(trainer: Any) -> str | None:
    """The estimator behind the KL that `trainer` logs; None for a trainer that is neither GRPO nor RLOO."""
    names = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.trainer.")]
    return next((ESTIMATES[name] for name in names if name in ESTIMATES), None)


def problems(trainer: Any, target: Any, unit: Any) -> list[str]:
    """Every problem, one line each, with how to fix it."""
    version = trl_version()
    if version is None:
        return [f"kl-budget: TRL is not installed: pip install 'trl=={TESTED}'"]
    if not version.startswith(FITS):
        return [f"kl-budget: TRL {version} is installed, {FITS}* is needed: pip install 'trl=={TESTED}'"]
    name = type(trainer).__name__
    if estimate_of(trainer) is None:
        return [f"kl-budget: it holds the KL of {' and '.join(ESTIMATES)}; {name} is neither"]
    found = []
    if any(isinstance(callback, KLBudget) for callback in trainer.callback_handler.callbacks):
        found.append("kl-budget: this trainer already has a KL budget: attach one")
    if not trainer.beta:
        found.append(
            f"kl-budget: beta is 0, so {name} has no reference model and logs no KL: "
            f"{name.removesuffix('Trainer')}Config(beta=0.04) sets the starting beta"
        )
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0.0 < target < math.inf:
        found.append(f"kl-budget: target must be a number of nats above 0, got {target!r}")
    if unit not in UNITS:
        found.append(f"kl-budget: unknown unit {unit!r}{suggestion(str(unit), UNITS)}")
    if trainer.args.restore_callback_states_from_checkpoint:
        found.append(
            "kl-budget: restore_callback_states_from_checkpoint creates callbacks without their trainer: remove it; "
            "the budget restores itself"
        )
    return found


def doubts(trainer: Any) -> list[str]:
    """Settings that change the meaning of the measured KL, `name: text` each."""
    args = trainer.args
    found = []
    if args.top_k or args.top_p != 1.0 or args.min_p or args.repetition_penalty != 1.0:
        found.append(
            "sampling: top_k, top_p, min_p or repetition_penalty change the policy that samples, so the estimated KL "
            "may be too low, or below 0"
        )
    if args.sync_ref_model:
        found.append("moving-reference: sync_ref_model changes the reference; the budget is the KL to the current one")
    dropout = any(
        getattr(module, "p", 0.0) > 0.0 for module in trainer.model.modules() if "Dropout" in type(module).__name__
    )
    if dropout and not args.disable_dropout:
        found.append("dropout: the policy's dropout is on, and its noise counts as KL: disable_dropout=True")
    return found


def trl_version() -> str | None:
    """The version that is installed; None where there is none."""
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return None
