"""In every process of a group: are gradients that travel in the backward pass those that travel after it?

The first process prints the order of events. An AssertionError where a bit differs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_kl import gradients
from rlhf_kl.distributed import Group
from rlhf_kl.gradients import buckets

gradients.BUCKET = 3000  # numbers
events: list[str] = []
all_reduce = dist.all_reduce


def noted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    events.append(f"sends {tensor.numel()}")
    return all_reduce(tensor, *arguments, **named)


def after_the_pass(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The sums, by buckets in the order of the parameters."""
    found: list[torch.Tensor] = []
    for bucket in buckets(parameters, gradients.BUCKET):
        joined = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        all_reduce(joined)
        found += joined.split([p.numel() for p in bucket])
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    group, rank = Group(timedelta(minutes=1)), dist.get_rank()
    dist.all_reduce = noted
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(50, 50) for _ in range(5)))
    experts = nn.ModuleList(nn.Linear(50, 50) for _ in range(3))  # the second of one process, the third of none
    parameters = [*experts.parameters(), *layers.parameters()]
    layers[0].weight.register_hook(lambda _: events.append("first layer"))
    torch.manual_seed(rank)
    inputs = torch.randn(2, 7, 50)
    sums: list[list[Any]] = []
    for early in (False, True):
        for number, x in enumerate(inputs):
            x = experts[int(rank == 1)](x) if number == 0 else x
            with group.sending(parameters, last=early and number == 1):
                layers(x).square().mean().backward()
        if early:
            group._sum_gradients(parameters)
        sums.append([p.grad for p in parameters] if early else after_the_pass(parameters))
        for parameter in parameters:
            parameter.grad = None
    if rank == 0:
        print("; ".join(events), flush=True)
    pairs = [(a.view_as(p), b) for a, b, p in zip(*sums, parameters, strict=True)]
    ok = all((not a.any() if b is None else torch.equal(a, b)) for a, b in pairs)
    missing = [b is None for _, b in pairs]
    dist.destroy_process_group()
    assert ok
    assert missing == [False] * 4 + [True] * 2 + [False] * 10
