"""Reads the metrics of TRL's trainers, and adds k3 if they log the noisier k1."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_kl.ops.kl import k3


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
