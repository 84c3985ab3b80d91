"""The loop of supervised training that `sft` and `reward-model` share: epochs of shuffled minibatches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rlhf_kl.config.schema.sections import EpochsSection
from rlhf_kl.distributed import Ranks
from rlhf_kl.events import Event, StepSkipped
from rlhf_kl.gradients import scale_for
from rlhf_kl.memory import memory_for, smaller_pass
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.pretrained import parameter_count
from rlhf_kl.ops.packing import group_lengths, pass_overhead
from rlhf_kl.optim import adamw, lr_factor, set_learning_rate, supervised_learning_rate
from rlhf_kl.seeding import shuffled

ALONE = Ranks()


class Task(ABC):
    """What is learned: a model, rows of data, the loss on some of them, and figures on held-out rows."""

    data: ClassVar[str]  # its config key
    unit: ClassVar[str]  # of its rows, in the plural

    def __init__(self, model: Any, lengths: list[int], weights: list[float], fingerprint: str) -> None:
        """`lengths`: tokens of each row; rows of near-equal length share a pass. `weights`: of each row in a mean.

        `fingerprint`: of the rows.
        """
        self.model, self.lengths, self.weights, self.fingerprint = model, lengths, weights, fingerprint
        self.notes: list[str] = []  # about rows that were cut or left out

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss of some rows, and sums of the logged metrics."""

    @abstractmethod
    def evaluate(self, ranks: Ranks = ALONE) -> dict[str, Any]:
        """The `eval/*` figures of held-out rows."""

    def distribution(self) -> dict[str, Any]:
        """How the scores of the last evaluation are distributed, for the summary; {} where there are none."""
        return {}

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained model with its tokenizer into a folder."""


class SupervisedTrainer:
    """AdamW, warm-up and schedule, gradient clipping, token-weighted means over microbatches of near-equal length."""

    def __init__(
        self,
        task: Task,
        settings: EpochsSection,
        seed: int,
        ranks: Ranks = ALONE,
        dtype: str = "float32",
        *,
        new: bool = False,
    ) -> None:
        """`dtype`: in which the layers compute. `new`: whether the model begins at random."""
        self.task, self.model, self.settings, self.seed, self.ranks = task, task.model, settings, seed, ranks
        size, adapter = parameter_count(self.model), has_adapter(self.model)
        usual = supervised_learning_rate(size, new=new, adapter=adapter)
        self.peak = usual if settings.learning_rate == "auto" else settings.learning_rate
        self.optimizer = adamw(self.model, self.peak, settings.weight_decay)
        self.scale = scale_for(dtype, next(self.model.parameters()).device)
        self.per_epoch = math.ceil(len(task) / settings.batch_size)
        self.steps = max(1, round(settings.epochs * self.per_epoch))
        self.rows = settings.microbatch_size  # of a pass, at most
        self.skipped = 0  # steps in a row
        self.events: list[Event] = []  # of the last step

    @property
    def stuck(self) -> bool:
        """Whether more steps in a row were skipped than the settings allow."""
        return self.skipped >= self.settings.max_skipped

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step, of which the first is 1; returns its figures."""
        settings, ranks = self.settings, self.ranks
        batch = self.batch(step)
        # In the middle of the step, so that the first step of a warm-up does not have rate 0.
        factor = lr_factor(settings.lr_schedule, (step - 0.5) / self.steps, settings.warmup)
        set_learning_rate(self.optimizer, self.peak * factor)
        weight = sum(self.task.weights[row] for row in batch)
        sums = self.backward(ranks.mine(batch), weight)
        norm = float(ranks.step(self.optimizer, self.model.parameters(), settings.max_grad_norm, self.scale))
        figures: dict[str, Any] = {name: value / weight for name, value in sums.items()}
        overflowed = False
        if self.scale is not None:
            figures["train/loss_scale"], figures["train/overflows"] = self.scale.read()
            overflowed = figures["train/overflows"] > 0 and math.isfinite(figures["train/loss"])
        self.skipped = 0 if math.isfinite(norm) or overflowed else self.skipped + 1
        self.events = [StepSkipped()] if self.skipped else []
        return figures | {
            "step": step,
            "train/grad_norm": norm,
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def backward(self, rows: list[int], weight: float) -> dict[str, float]:
        """Gradients of the mean loss on this process's rows; returns the sums over all processes, by name."""
        lengths = [self.task.lengths[row] for row in rows]
        overhead = pass_overhead(next(self.model.parameters()).device)

        most = self.rows * max(lengths, default=0)

        def accumulate() -> dict[str, float]:
            totals: dict[str, float] = {}
            groups = group_lengths(lengths, most_rows=self.rows, most_tokens=most, overhead=overhead)
            for group in groups:
                with memory_for(f"a training pass of {len(group)} rows does not fit", smaller_pass(self.settings.path)):
                    loss, sums = self.task.loss([rows[i] for i in group])
                    mean = loss / weight
                    with self.ranks.sending(self.model.parameters(), last=group is groups[-1]):
                        (mean if self.scale is None else self.scale(mean)).backward()
                _add(totals, {"train/loss": float(loss.detach()), **sums})
            return totals

        sums = self.ranks.run(accumulate)
        totals: dict[str, float] = {}
        for each in self.ranks.all(sums):
            _add(totals, each)
        return totals

    def batch(self, step: int) -> list[int]:
        """Rows of a step: a function of the seed and the step only."""
        epoch, number = divmod(step - 1, self.per_epoch)
        order = shuffled(len(self.task), self.seed, "epoch", epoch).tolist()
        size = self.settings.batch_size
        return order[number * size : (number + 1) * size]


def _add(totals: dict[str, float], sums: Mapping[str, float]) -> None:
    for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + value
