from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl import distributed, sharding
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Group, Ranks, _report
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


def test_gradients_travel_and_frozen_weights_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that have the same gradients; the all-reduce is stood in for."""
    travelled: list[int] = []

    def doubled(tensor: torch.Tensor, async_op: bool = False, group: None = None) -> SimpleNamespace:
        travelled.append(tensor.numel())
        tensor.mul_(2.0)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed.dist, "all_reduce", doubled)
    monkeypatch.setattr(distributed, "BUCKET", 8)
    frozen = nn.Parameter(torch.ones(1000), requires_grad=False)
    learned, more, unused = (nn.Parameter(torch.ones(size)) for size in (5, 3, 4))
    learned.grad, more.grad = torch.full((5,), 3.0), torch.full((3,), 0.5)
    group = Group.__new__(Group)
    group.control = None
    group._sum_gradients([frozen, learned, more, unused])
    assert torch.equal(learned.grad, torch.full((5,), 6.0))
    assert torch.equal(more.grad, torch.ones(3))
    assert unused.grad is None
    assert frozen.grad is None
    assert travelled == [3, 5 + 3, 4]  # three flags, and what fits into a bucket of eight


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
