"""A KL budget for TRL's GRPOTrainer and RLOOTrainer: `KLBudget.attach(trainer, target=0.1)`."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from rlhf_kl.control import Guard, build_controller
from rlhf_kl.errors import InputError, blame, suggestion
from rlhf_kl.events import worded
from rlhf_kl.ops.kl import k3
from rlhf_kl.plugins import users_code

TESTED = "1.14 to 1.16"
# What is read of a trainer. All but the first three are private: another version may lack them.
NEEDED = (
    *("accelerator", "beta", "num_iterations", "_metrics", "_step"),
    *("_get_per_token_logps_and_entropies", "_generate_and_score_completions"),
)
OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
UNITS = ("token", "sequence")
ALERT = 2.0  # targets: a KL above it is not held
logger = logging.getLogger(__name__)
MOST_LOG_RATIO = 3.0  # of a response after an update: few responses with large ratios would be most of a mean


class KLBudget(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Moves `trainer.beta` after every rollout so that the KL to the reference stays at a target.

    The KL is k3 from the log-probs of the policy that sampled the rollout, before its first optimizer step, over all
    tokens of all processes. Those that TRL computes are used; a missing one costs a pass without gradients: GRPO's
    policy, and with beta 0 the reference. Both trainers read `beta` at every loss (GRPO) or rollout (RLOO), but
    `args.beta` only at their creation. One more pass, after the last optimizer step, shows the controller the step.

    With beta 0 there is nothing to move, and the budget watches: the reference is the model as it is at `attach`, which
    takes the memory of its weights once more, or the model with its adapter switched off, which takes none.

    The trainer's trackers log, for each rollout, `kl_budget/`: `kl` and `target` (nats in `unit`), `nats_per_token`,
    `nats_per_sequence`, `beta` (used in this rollout), `beta_next`. Every checkpoint holds the state, which
    `trainer.train(resume_from_checkpoint=...)` restores.
    """

    def __init__(
        self,
        trainer: Any,
        controller: Guard | None,
        target: float,
        unit: str,
        log_only: bool,
        stop_at: float | None,
    ) -> None:
        """Use `attach` instead, which checks its arguments and the trainer."""
        self.trainer, self.controller = trainer, controller
        self.target, self.unit, self.log_only, self.stop_at = target, unit, log_only, stop_at
        self.rollout_microbatches = trainer.args.steps_per_generation * trainer.num_iterations
        self.kls: list[float] | None = None  # of the rollouts since the last update; None before the first rollout
        self.rollout = 0
        self.rate: float | None = None  # the learning rate of the last rollout's steps
        self.warned: set[str] = set()
        self.rollouts = RolloutKL(trainer, self._record)

    @classmethod
    def attach(
        cls,
        trainer: Any,
        target: float = 0.1,
        unit: str = "token",
        controller: Any = "adaptive",
        log_only: bool = False,
        stop_at: float | None = None,
        ref_model: Any = None,
        **options: Any,
    ) -> KLBudget:
        """Hold the KL of `trainer`, a GRPOTrainer or RLOOTrainer, at `target` nats per `unit`; watch it if beta is 0.

        unit: "token" or "sequence" (the sum over a response, mean over responses).
        controller: a built-in's name, "module:Class", "file.py:Class", a class, or an object whose
            `update(kl, episodes)` changes its `coef` or returns beta. All but an object start at the trainer's beta and
            take `options`.
        log_only: log the beta that would follow each rollout, without changing the trainer's.
        stop_at: end the training after a rollout with a KL above it, in nats per `unit`.
        ref_model: with beta 0, a model of the same shape whose weights are the reference's.
        Raises InputError with every problem and how to fix it.
        """
        with blame("kl-budget"):
            if found := problems(trainer, target, unit, stop_at):
                raise InputError(*found)
            control = _build(controller, options, trainer, float(target)) if trainer.beta else None
            if not (trainer.beta or is_adapter(trainer)):
                trainer.ref_model = frozen_copy(trainer, ref_model)
        budget = cls(trainer, control, float(target), unit, log_only, stop_at)
        trainer.add_callback(budget)
        budget._use_coef()
        if trainer.accelerator.is_main_process:
            print(budget.describe(), file=sys.stderr)
        for doubt in doubts(trainer):
            budget._warn(doubt)
        return budget

    def describe(self) -> str:
        """One line: which KL is held or watched at which target, and the bounds of beta."""
        does = "holds" if self.controller and not self.log_only else "watches"
        limit = f"{'at' if self.controller else 'with a limit of'} {self.target:g} nats per {self.unit}"
        line = f"kl-budget: {does} the KL to the reference (k3; fresh samples, all processes) {limit}"
        if self.controller:
            low, high = self.controller.bounds
            line += f"; beta {self.controller.beta:g}, between {low:g} and {high:g}"
        else:
            reference = "the model with its adapter switched off" if is_adapter(self.trainer) else "a copy of the model"
            line += f"; beta 0; the reference is {reference}: a pass more for each rollout"
        return line + (f"; stops above {self.stop_at:g}" if self.stop_at else "")

    def on_train_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Restore the saved state, if training resumes from a checkpoint."""
        self.rollout = self.trainer._step // self.rollout_microbatches
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            if state.global_step and self.controller:
                self._warn(f"no-state: the checkpoint holds no KL budget; beta starts at {self.controller.beta:g}")
            return
        saved = saved["attributes"]
        if (saved["target"], saved["unit"]) != (self.target, self.unit):
            raise InputError(
                f"kl-budget: the checkpoint held {saved['target']:g} nats per {saved['unit']}, this run has "
                f"{self.target:g} per {self.unit}: attach with the saved target"
            )
        self.rate = saved["rate"]
        if self.controller and saved["controller"]:
            try:
                self.controller.restore(saved["controller"])
            except ValueError as error:
                raise InputError(f"kl-budget: {error}") from None
        self._use_coef()

    def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        rollout = self.trainer._step // self.rollout_microbatches
        if rollout != self.rollout and self.kls is None:
            raise InputError(f"kl-budget: {type(self.trainer).__name__} made a rollout that could not be measured")
        if rollout != self.rollout:
            kls, self.kls, self.rollout = self.kls, [], rollout
            if kls:
                self._update(kls, control)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        kept = {"target": self.target, "unit": self.unit, "rate": self.rate}
        return {"args": {}, "attributes": kept | {"controller": self.controller and self.controller.save()}}

    def _record(self, kl: dict[str, float]) -> None:
        """Log a rollout's KL in both units, and keep that of a training rollout for the next update."""
        training = self.trainer.model.training
        self._log({f"nats_per_{unit}": value for unit, value in kl.items()}, "train" if training else "eval")
        if training:
            self.kls = [*(self.kls or []), kl[self.unit]]

    def _log(self, figures: dict[str, float], mode: str = "train") -> None:
        for name, value in figures.items():
            self.trainer._metrics[mode][f"kl_budget/{name}"].append(value)

    def _update(self, kls: list[float], control: Any) -> None:
        if not (known := [kl for kl in kls if math.isfinite(kl)]):
            self._warn("no-tokens: all tokens of a rollout are masked (mask_truncated_completions): beta stays")
            return
        kl = fmean(known)
        self._log({"kl": kl, "target": self.target})
        if kl > (limit := self.target * (ALERT if self.controller else 1.0)):
            self._warn(f"kl-above-limit: the KL is {kl:.4g} nats per {self.unit}, above {limit:.4g}")
        if self.stop_at and kl > self.stop_at:
            self._warn(f"stop: the KL is {kl:.4g} nats per {self.unit}, above stop_at={self.stop_at:g}: training ends")
            control.should_training_stop = True
        if self.controller:
            self._move(self.controller, kl, kls)

    def _move(self, controller: Guard, kl: float, kls: list[float]) -> None:
        beta = self.trainer.beta
        if self.log_only:  # each proposal starts from the beta that was used
            controller.restore(controller.save() | {"beta": beta})
        move = None
        if controller.needs_update_kl:
            after = self.rollouts.after_update()[self.unit]
            move = kls[-1], after, after
        for alert in worded(controller.step(kl, self.trainer.args.generation_batch_size * len(kls), move)):
            self._warn(alert)
        rate = float(self.trainer.lr_scheduler.get_last_lr()[0])
        if self.rate:
            controller.change_rate(rate / self.rate)
        self.rate = rate
        if controller.adjusts and controller.beta in controller.bounds:
            self._warn(f"beta-at-bound: beta {controller.beta:g} is at its bound, at a KL of {kl:.4g}")
        self._log({"beta": beta, "beta_next": controller.beta})
        self._use_coef()

    def _use_coef(self) -> None:
        if self.controller and not self.log_only:
            self.trainer.beta = self.controller.beta

    def _warn(self, message: str) -> None:
        """Warn once per name (the word before the colon)."""
        name = message.partition(":")[0]
        if name not in self.warned and self.trainer.accelerator.is_main_process:
            logger.warning("kl-budget: %s", message)
        self.warned.add(name)


def _build(controller: Any, options: dict[str, Any], trainer: Any, target: float) -> Guard:
    """The controller. Raises InputError."""
    args, beta = trainer.args, float(trainer.beta)
    if not isinstance(controller, str | type):
        if options:
            raise InputError(f"options ({', '.join(options)}) go to a controller's name or class, not to an object")
        with users_code("controller:"):
            return Guard(controller, start=beta)
    steps = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps  # of a rollout
    batch_size = args.generation_batch_size
    total = int(args.max_steps / steps * batch_size) if args.max_steps > 0 else None
    sizes = {"target": target, "coef": beta, "total_episodes": total, "batch_size": batch_size}
    return build_controller(controller, options, where="controller", **sizes)


class RolloutKL:
    """The k3 of every rollout of a trainer, over all its processes: `record({"token": nats, "sequence": nats})`."""

    def __init__(self, trainer: Any, record: Callable[[dict[str, float]], None]) -> None:
        self.trainer, self.record = trainer, record
        self.get_logprobs = trainer._get_per_token_logps_and_entropies
        self.generate = trainer._generate_and_score_completions
        self.own: list[torch.Tensor] = []  # what TRL computes in a rollout: policy's log-probs, then the reference's
        trainer._get_per_token_logps_and_entropies = self._kept
        trainer._generate_and_score_completions = self._rollout

    def after_update(self) -> dict[str, float]:
        """The KL of the policy as it is now, from the last rollout's samples, each weighted with its ratio.

        The same samples before and after an update show the step without sampling noise; the weights, what the
        step does to the later tokens of a response and to its length.
        """
        output, old, reference, mask = self.last
        with torch.no_grad():
            new = self._logprobs(self.trainer.model, output)
            ratio = ((new - old) * mask).sum(1, keepdim=True).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()  # (B, 1)
            return self._mean(k3(new, reference), mask * ratio, mask.any(1, keepdim=True) * ratio)

    def _kept(self, *args: Any, **kwargs: Any) -> Any:
        result = self.get_logprobs(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.own.append(result[0].float())
        return result

    def _rollout(self, inputs: Any) -> Any:
        trainer = self.trainer
        self.own.clear()
        output = self.generate(inputs)
        with torch.no_grad():
            if trainer.beta:
                reference = self.own.pop()
            elif is_adapter(trainer):
                with trainer.accelerator.unwrap_model(trainer.model).disable_adapter():
                    reference = self._logprobs(trainer.model, output)
            else:
                reference = self._logprobs(trainer.ref_model, output)
            policy = self.own.pop() if self.own else self._logprobs(trainer.model, output)
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            kl = self._mean(k3(policy, reference), mask, mask.any(1, keepdim=True))
        if trainer.model.training:
            self.last = output, policy, reference, mask
        self.record(kl)
        return output

    def _logprobs(self, model: Any, output: dict[str, Any]) -> torch.Tensor:
        """Of the completions (B, T), float32."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        mode = "train" if self.trainer.model.training else "eval"
        size = getattr(self.trainer.args, f"per_device_{mode}_batch_size")
        others = {name: output[name] for name in OF_IMAGES if name in output}
        length = output["completion_ids"].size(1)
        result = self.get_logprobs(model, ids, attended, length, batch_size=size, **others)[0]
        return result.float()  # type: ignore[no-any-return]

    def _mean(self, kl: torch.Tensor, tokens: torch.Tensor, sequences: torch.Tensor) -> dict[str, float]:
        """The mean of kl (B, T) over tokens, weighted (B, T), and over sequences, weighted (B, 1); NaN without any."""
        sums = torch.stack([(kl * tokens).sum(), tokens.sum().float(), sequences.sum().float()])
        total, tokens, sequences = self.trainer.accelerator.reduce(sums, reduction="sum").tolist()
        return {"token": total / tokens, "sequence": total / sequences} if tokens else dict.fromkeys(UNITS, math.nan)


def is_adapter(trainer: Any) -> bool:
    return hasattr(trainer.accelerator.unwrap_model(trainer.model), "disable_adapter")


def frozen_copy(trainer: Any, ref_model: Any) -> Any:
    """A copy of the trainer's model, as TRL has patched it, with the weights of `ref_model` if there is one."""
    reference = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model)).requires_grad_(False)
    if ref_model is not None:
        try:
            reference.load_state_dict(ref_model.state_dict())
        except RuntimeError as error:
            raise InputError(f"ref_model does not fit the trainer's model: {error}") from None
    return trainer.accelerator.prepare_model(reference, evaluation_mode=True).eval()


def problems(trainer: Any, target: Any, unit: Any, stop_at: Any) -> list[str]:
    """Every problem, one line each, with how to fix it."""
    name = type(trainer).__name__
    if missing := [attribute for attribute in NEEDED if not hasattr(trainer, attribute)]:
        return [f"{name} has no {', '.join(missing)}: attach to TRL's GRPOTrainer or RLOOTrainer (TRL {TESTED})"]
    found = []
    if any(isinstance(callback, KLBudget) for callback in trainer.callback_handler.callbacks):
        found.append("this trainer already has a KL budget: attach one")
    if (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled) and not (trainer.beta or is_adapter(trainer)):
        found.append(
            "beta is 0, and a sharded model cannot be copied as the reference: beta=1e-6 with log_only=True watches "
            "TRL's own"
        )
    if not (isinstance(target, int | float) and 0.0 < target < math.inf):
        found.append(f"target must be a number of nats above 0, got {target!r}")
    elif stop_at is not None and not (isinstance(stop_at, int | float) and stop_at >= target):
        found.append(f"stop_at must be a number of nats from target ({target:g}) up, got {stop_at!r}")
    if unit not in UNITS:
        found.append(f"unknown unit {unit!r}{suggestion(str(unit), UNITS)}")
    if trainer.args.restore_callback_states_from_checkpoint:
        found.append("remove restore_callback_states_from_checkpoint: the budget restores itself")
    return found


def doubts(trainer: Any) -> list[str]:
    """Settings that change the meaning of the measured KL, `name: text` each."""
    args = trainer.args
    found = []
    if args.top_k or args.top_p != 1.0 or args.min_p or args.repetition_penalty != 1.0:
        found.append(
            "sampling: top_k, top_p, min_p or repetition_penalty change the policy that samples: k3 is not its KL"
        )
    if args.sync_ref_model:
        found.append("moving-reference: sync_ref_model changes the reference; the budget is the KL to the current one")
    layers = [module for module in trainer.model.modules() if "Dropout" in type(module).__name__]
    if not args.disable_dropout and any(getattr(layer, "p", 0.0) > 0.0 for layer in layers):
        found.append("dropout: the policy's dropout is on, and its noise counts as KL: disable_dropout=True")
    return found
