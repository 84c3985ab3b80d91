from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl import distributed, gradients, sharding
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Group, Ranks, _lost_rank, _report
from rlhf_kl.errors import InputError, OtherProcessFailed, ServiceFailed
from rlhf_kl.sharding import load_tensors, tensors_of
from rlhf_kl.training.start import check_sizes


def test_several_share_the_rows_without_gap_or_overlap_and_one_writes() -> None:
    group = [Ranks() for _ in range(3)]
    for index, one in enumerate(group):
        one.index, one.count = index, 3
    assert [list(one.mine(range(12))) for one in group] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    uneven = [one.mine(list("abcdefg")) for one in group]
    assert "".join(row for share in uneven for row in share) == "abcdefg"
    assert {len(share) for share in uneven} == {2, 3}
    assert [one.writes for one in group] == [True, False, False]


@pytest.mark.parametrize(
    ("failures", "raised"),
    [
        ([None, None], [None, None]),
        ([None, ServiceFailed("x")], [ServiceFailed, ServiceFailed]),
        ([ServiceFailed("x"), ServiceFailed("y")], [ServiceFailed, ServiceFailed]),
        ([ServiceFailed("x"), InputError("y", "z")], [InputError, InputError]),
        ([None, ServiceFailed("x"), InputError("y")], [InputError] * 3),
        ([ServiceFailed("x"), RuntimeError("y")], [OtherProcessFailed, RuntimeError]),
        ([InputError("x"), RuntimeError("y")], [InputError, RuntimeError]),
    ],
)
def test_all_fail_where_one_does_and_a_checkpoint_is_left_by_all_or_by_none(
    failures: list[Exception | None], raised: list[type[Exception] | None]
) -> None:
    reports = [failure and _report(failure) for failure in failures]
    for index, failure in enumerate(failures):
        one = Ranks()
        one.index, one.count = index, len(failures)
        one.all = lambda _, scores=False: reports  # type: ignore[method-assign]

        def work(failure: Exception | None = failure) -> str:
            if failure is not None:
                raise failure
            return "done"

        expected = raised[index]
        with nullcontext() if expected is None else pytest.raises(expected):
            assert one.run(work) == "done"


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_clipped_and_left_out_where_its_gradient_is_not_finite(
    optimizer: Any, fused: bool, bad: bool
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, torch.inf if bad else 4.0])
    norm = Ranks().step(optimizer([weight], lr=1.0, fused=fused), [weight], 1.0)
    assert float(norm) == (torch.inf if bad else 5.0)
    moved = -torch.ones(2) if optimizer is torch.optim.AdamW else -torch.tensor([0.6, 0.8])
    torch.testing.assert_close(weight.detach(), torch.zeros(2) if bad else moved)
    assert weight.grad is None


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> tuple[Group, list[int]]:
    """One of two processes that have the same gradients, and the sizes of what travels; buckets hold eight numbers."""
    travelled: list[int] = []

    def doubled(tensor: torch.Tensor, async_op: bool = False, group: None = None) -> SimpleNamespace:
        travelled.append(tensor.numel())
        tensor.mul_(2.0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed.dist, "all_reduce", doubled)
    monkeypatch.setattr(gradients, "BUCKET", 8)
    group = Group.__new__(Group)
    group.control, group.count = None, 2
    return group, travelled


def test_gradients_travel_and_frozen_weights_do_not(doubling: tuple[Group, list[int]]) -> None:
    group, travelled = doubling
    frozen = nn.Parameter(torch.ones(1000), requires_grad=False)
    learned, more, unused = (nn.Parameter(torch.ones(size)) for size in (5, 3, 4))
    learned.grad, more.grad = torch.full((5,), 3.0), torch.full((3,), 0.5)
    group._sum_gradients([frozen, learned, more, unused])
    assert torch.equal(learned.grad, torch.full((5,), 6.0))
    assert torch.equal(more.grad, torch.ones(3))
    assert unused.grad is None
    assert frozen.grad is None
    assert travelled == [4, 5 + 3, 3]  # what fits into a bucket of eight, the last first, and three flags


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_the_last_pass_travel_before_it_has_reached_the_first_layer(
    doubling: tuple[Group, list[int]], drops: bool
) -> None:
    """Four layers of six numbers, each a bucket; one expert gets a gradient in the first pass only, one in none."""
    group, travelled = doubling
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    once, never = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters = [*once.parameters(), *never.parameters(), *layers.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    x, reached = torch.ones(1, 2), list[list[int]]()
    layers[0].weight.register_hook(lambda _: reached.append(list(travelled)))

    def loss(last: bool) -> torch.Tensor:
        return layers(x if last else once(x)).sum()

    for _ in range(2):
        for last in (False, True):
            with group.sending(parameters, last=last):
                loss(last).backward()
        assert reached == [[], [6, 6, 6]]
        assert travelled == [6] * 4  # not the expert, which may get a gradient until the end
        if drops:
            group.drop(optimizer, parameters)
        else:
            group._sum_gradients(parameters)
            mine = torch.autograd.grad(loss(False) + loss(True), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, mine, strict=True):
                assert (parameter.grad is None) == (gradient is None)
                assert gradient is None or torch.equal(parameter.grad, 2.0 * gradient)
            optimizer.zero_grad()
        assert travelled == [6] * 6 + [len(parameters)]
        assert all(parameter.grad is None for parameter in parameters)
        layers(x).sum().backward()  # another pass: nothing travels
        assert len(travelled) == 7
        optimizer.zero_grad()
        travelled.clear()
        reached.clear()


def test_an_exchange_that_fails_in_a_backward_pass_is_told_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    monkeypatch.setattr(distributed.dist, "all_reduce", fails)
    group, weight = Group.__new__(Group), nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError) as failure, group.sending([weight]):
        weight.sum().backward()
    unknown: Any = SimpleNamespace(missing=lambda late: None)
    assert isinstance(_lost_rank(failure.value, 1.0, unknown), OtherProcessFailed)
    weight.sum().backward()  # no hook stays


class Tied(nn.Module):
    """A head that is the embedding, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_tied_tensors_are_held_once_and_found_under_any_name(name: str) -> None:
    module = Tied()
    assert sorted(dict(tensors_of(module))) == ["embedding.weight", "scale"]
    load_tensors(module, {name: torch.full((3, 2), 7.0), "scale": torch.tensor([2.0]), "more": torch.zeros(1)})
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.unique().tolist() == [7.0]
    assert module.scale.item() == 2.0


@pytest.mark.parametrize(
    "tensors", [{"scale": torch.tensor([2.0])}, {"head.weight": torch.ones(1), "scale": torch.tensor([2.0])}]
)
def test_what_does_not_fit_changes_nothing(tensors: dict[str, torch.Tensor]) -> None:
    module = Tied()
    with pytest.raises(InputError, match=r": embedding\.weight"):
        load_tensors(module, {"scale": torch.tensor([2.0]), **tensors})
    assert module.scale.item() == 1.0


@pytest.mark.parametrize(
    ("processes", "oldest", "message"),
    [
        (2, (99, 0), "policy.shard: torch 2.9 or newer is needed"),
        (1, (2, 0), "policy.shard: needs several processes: start them with torchrun"),
    ],
)
def test_where_nothing_can_be_sharded(
    monkeypatch: pytest.MonkeyPatch, processes: int, oldest: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(sharding, "OLDEST_TORCH", oldest)
    config = TrainConfig.model_validate({"policy": {"model": "builtin:reviews", "shard": True}})
    with pytest.raises(InputError, match=re.escape(message)):
        check_sizes(config, processes=processes)
