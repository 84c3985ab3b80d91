"""The loop of supervised training that `sft` and `reward-model` share: epochs of shuffled minibatches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from rlhf_kl.config.schema import EpochsSection
from rlhf_kl.ops.packing import group_lengths, pass_overhead
from rlhf_kl.processes import Processes
from rlhf_kl.seeding import shuffled
from rlhf_kl.trainers.guards import Microbatch
from rlhf_kl.trainers.optim import adamw, lr_factor, set_learning_rate


class Objective(Protocol):
    """A training task: rows of data, and the loss on some of them."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def size(self, row: int) -> int:
        """Length of a row in tokens: rows of near-equal length share a pass."""
        ...

    def weight(self, row: int, /) -> float:
        """Weight of the row in a mean: its scored tokens, or 1."""
        ...

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss of some rows, and sums of the logged metrics."""
        ...


class SupervisedTrainer:
    """AdamW, warm-up and schedule, gradient clipping, token-weighted means over microbatches of near-equal length."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: EpochsSection,
        seed: int,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.objective, self.settings, self.seed = model, objective, settings, seed
        self.processes = processes or Processes()
        self.optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
        self.per_epoch = math.ceil(len(objective) / settings.batch_size)
        self.steps = max(1, round(settings.epochs * self.per_epoch))
        self.microbatch = Microbatch(settings.microbatch_size)
        self.skipped = 0  # steps in a row

    @property
    def stuck(self) -> bool:
        """Whether more steps in a row were skipped than the settings allow."""
        return self.skipped >= self.settings.max_skipped

    def train(self, start: int = 1) -> Iterator[dict[str, Any]]:
        """Yields a row of figures after each step; `start` is the first step to run (resume)."""
        for step in range(start, self.steps + 1):
            began = time.perf_counter()
            row = self.step(step)
            row |= {"step": step, "time/step_s": time.perf_counter() - began}
            yield row

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step."""
        settings = self.settings
        every = self.batch(step)
        rows = every[self.processes.rows(len(every))]
        lengths = [self.objective.size(row) for row in rows]
        # In the middle of the step, so that the first step of a warm-up does not have rate 0.
        factor = lr_factor(settings.lr_schedule, (step - 0.5) / self.steps, settings.warmup)
        set_learning_rate(self.optimizer, settings.learning_rate * factor)
        weight = sum(self.objective.weight(row) for row in every)
        overhead = pass_overhead(next(self.model.parameters()).device)

        def accumulate(size: int) -> dict[str, float]:
            totals: dict[str, float] = {}
            most = size * max(lengths, default=0)
            for group in group_lengths(lengths, most_rows=size, most_tokens=most, overhead=overhead):
                loss, sums = self.objective.loss([rows[i] for i in group])
                (loss / weight).backward()
                for name, value in {"train/loss": float(loss.detach()), **sums}.items():
                    totals[name] = totals.get(name, 0.0) + value
            return totals

        together = self.processes
        here = together.together(lambda: self.microbatch.fit(accumulate, self.optimizer.zero_grad))
        self.microbatch.halve_to(min(together.all(self.microbatch.rows)))
        totals = _added(together.all(here))
        together.sum_gradients(self.model.parameters())
        norm = together.clip_gradients(self.model.parameters(), settings.max_grad_norm)
        alerts = list(dict.fromkeys(alert for each in together.all(self.microbatch.alerts()) for alert in each))
        if math.isfinite(norm):
            self.optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
            alerts.append("step-skipped: the gradient was not finite, so the step changed nothing")
        self.optimizer.zero_grad()
        figures = {name: value / weight for name, value in totals.items()}
        return figures | {
            "train/grad_norm": norm,
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            **({"alerts": alerts} if alerts else {}),
        }

    def batch(self, step: int) -> list[int]:
        """Rows of a step: a function of the seed and the step only."""
        epoch, place = divmod(step - 1, self.per_epoch)
        order = shuffled(len(self.objective), self.seed, "epoch", epoch).tolist()
        size = self.settings.batch_size
        return order[place * size : (place + 1) * size]


def _added(parts: list[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    totals: dict[str, float] = {}
    for name, value in ((name, value) for part in parts for name, value in part.items()):
        totals[name] = totals.get(name, 0.0) + value
    return totals
