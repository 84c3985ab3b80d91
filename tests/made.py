"""Batches and policies that several files of tests need."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_kl.ops.packing import Layout
from rlhf_kl.types import Prompts, Responses

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


def move(policy: Any, seed: int, by: float = 0.3) -> None:
    """Adds noise to what is trained, as a training would move it."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * by)
