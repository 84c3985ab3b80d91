from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_kl.integrations.trl import Entries, log_k3


def test_entries_are_read_once_and_survive_the_log() -> None:
    trainer = SimpleNamespace(_metrics={"train": defaultdict(list)})
    entries = Entries(trainer, "kl")
    assert entries.new() == []
    trainer._metrics["train"]["kl"] += [1.0, 2.0]
    assert entries.new() == [1.0, 2.0]
    trainer._metrics["train"]["kl"].append(3.0)
    assert entries.new() == [3.0]
    trainer._metrics["train"].clear()  # what `log` does; the new list is as long as the part that was read
    trainer._metrics["train"]["kl"] += [4.0, 5.0, 6.0]
    assert entries.new() == [4.0, 5.0, 6.0]


def test_k3_of_a_rollout_is_a_mean_over_its_tokens() -> None:
    """By hand: lr = log 2 at the first token, 0 at the second; k3 = 1/2 - 1 + log 2 and 0; the third is padding."""
    policy, reference = torch.tensor([[0.5, 0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5, 0.1]]).log()
    logprobs = iter([policy, reference])

    class Trainer:
        _metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}  # noqa: RUF012
        accelerator = SimpleNamespace(reduce=lambda figures, reduction: figures)
        model = SimpleNamespace(training=True)

        def _get_per_token_logps_and_entropies(self) -> Any:
            return next(logprobs), None, None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with torch.no_grad():
                self._get_per_token_logps_and_entropies()
                self._get_per_token_logps_and_entropies()
            return {"completion_mask": torch.tensor([[1, 1, 0]])}

    trainer = Trainer()
    name = log_k3(trainer)
    trainer._generate_and_score_completions([])
    assert abs(trainer._metrics["train"][name][0] - (0.5 - 1 + 0.6931472) / 2) < 1e-6
