"""The global batch of several processes, from the rows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.processes import Processes
from rlhf_kl.types import RolloutBatch


def whole_batch(rollout: RolloutBatch, processes: Processes) -> RolloutBatch:
    """The rows of all processes, on the CPU if there are several; a single process keeps its own rows."""
    return rollout if processes.count == 1 else joined(processes.all(rollout.cpu()))


def joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """Concatenates batches by rows; prompts are padded on the left, responses on the right."""
    columns: dict[str, Any] = {}
    for column in fields(RolloutBatch):
        values = [getattr(part, column.name) for part in parts]
        if isinstance(values[0], list):
            columns[column.name] = [text for value in values for text in value]
        elif isinstance(values[0], dict):
            columns[column.name] = {name: torch.cat([value[name].cpu() for value in values]) for name in values[0]}
        elif values[0].dim() == 1:
            columns[column.name] = torch.cat(values)
        else:
            columns[column.name] = _padded(values, left=column.name.startswith("prompt_"))
    return RolloutBatch(**columns)


def _padded(parts: Sequence[Tensor], *, left: bool) -> Tensor:
    width = max(part.shape[1] for part in parts)
    gaps = [(width - part.shape[1], 0) if left else (0, width - part.shape[1]) for part in parts]
    return torch.cat([torch.nn.functional.pad(part, gap) for part, gap in zip(parts, gaps, strict=True)])
