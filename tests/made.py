"""Batches and policies that several files of tests need."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl.errors import InputError
from rlhf_kl.ops.packing import Layout
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.types import Prompts, Responses, RolloutBatch

Make = Callable[..., Any]

PROMPTS = (9, 9, 6, 6, 6, 9)  # tokens; rows with as many have the same prompt
RESPONSES = (5, 1, 3, 2, 5, 4)

BATCH = Responses(Prompts(["p", "q", "r"], [[]] * 3, [{}] * 3, [()] * 3), ["first", "second", "third"], [[1], [2], [3]])


def two_prompts() -> Layout:
    """Six rows over two prompts of different lengths, in tokens of letters."""
    noise = torch.Generator().manual_seed(0)
    width = max(PROMPTS)
    texts = {size: torch.randint(3, 7, (size,), generator=noise) for size in set(PROMPTS)}
    ids = torch.zeros(len(PROMPTS), width + max(RESPONSES), dtype=torch.long)
    for row, prompt, response in zip(ids, PROMPTS, RESPONSES, strict=True):
        row[width - prompt : width] = texts[prompt]
        row[width : width + response] = torch.randint(3, 7, (response,), generator=noise)
    return Layout(ids, width, torch.tensor(PROMPTS), torch.tensor(RESPONSES))


def rollout(mask: Tensor, **fields: Any) -> RolloutBatch:
    """A batch of responses with this mask (B, T); what is not given is zero."""
    zeros, ids, texts = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.long), [""] * len(mask)
    zero = zeros[:, 0]
    usual = RolloutBatch(ids, mask, ids, mask, *[zeros] * 8, {"reward": zero}, zero, mask[:, 0], texts, texts)
    return replace(usual, **fields)


def problem(call: Make, *arguments: Any, **options: Any) -> str:
    """What is wrong with the input, in one line."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    (line,) = caught.value.problems
    return str(line)


def numbers(text: str) -> list[float]:
    """Every number of a text, in its order: of a note that counts rows and names them."""
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", text)]


def weights(module: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def row_of(trainer: Any, step: int) -> dict[str, Any]:
    """What an update logs."""
    return update_row(trainer.update(step), trainer.settings)


class Recorder:
    """A controller that only writes down what it is given."""

    def __init__(self, coef: float = 0.2) -> None:
        self.coef = coef
        self.updates: list[tuple[float, int]] = []
        self.observed: list[tuple[float, float, float]] = []

    def update(self, kl: float, episodes: int) -> None:
        self.updates.append((kl, episodes))
        self.coef *= 2

    def observe_update(self, kl_before: float, kl_after: float, kl_whole: float) -> None:
        assert len(self.observed) == len(self.updates)  # before the update that it belongs to
        self.observed.append((kl_before, kl_after, kl_whole))


def move(policy: Any, seed: int, by: float = 0.3) -> None:
    """Adds noise to what is trained, as a training would move it."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * by)
