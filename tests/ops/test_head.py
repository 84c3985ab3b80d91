"""Logits exist a bounded chunk at a time, in every pass there is, and no result depends on its size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_kl.ops import head as module
from rlhf_kl.ops.head import Head, in_chunks, token_kl, token_logprobs, token_stats
from rlhf_kl.ops.logprobs import chosen_logprobs, compare_distributions, logprobs_and_kl

SUMS = Head(lambda x: x.sum(1, keepdim=True) + torch.arange(5), 5)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (99, [4])])
def test_chunks_come_in_order_and_are_joined(monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 5 * rows + 4)
    hidden, seen = torch.arange(8.0).view(4, 2), []

    def read(logits: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return logits[:, 0], second

    sums, seconds = in_chunks(read, SUMS, hidden, hidden[:, 1])
    assert sums.tolist() == [1.0, 5.0, 9.0, 13.0]
    assert seconds.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert seen == sizes


def test_no_state_gives_no_result() -> None:
    (nothing,) = in_chunks(lambda x: (x.sum(1),), SUMS, torch.zeros(0, 2))
    assert nothing.shape == (0,)


def test_chunks_are_computed_again_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no more logits are kept than those of one chunk; a single one is kept."""
    hidden, weight = torch.ones(7, 4, requires_grad=True), torch.ones(6, 4)
    calls: list[int] = []

    def logits(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ weight.T

    for rows, twice in ((2, True), (99, False)):
        monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 6 * rows)
        calls.clear()
        found = token_logprobs(hidden, Head(logits, 6), torch.zeros(7, dtype=torch.long))
        forward = len(calls)
        found.sum().backward()
        assert len(calls) == forward * (1 + twice)


@pytest.mark.parametrize("rows", [2, 99])
def test_figures_and_gradients_are_those_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 6 * rows)
    torch.manual_seed(0)
    weight, ref_weight = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    hidden, ref, ids = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4), torch.randint(6, (7,))
    head, ref_head = Head(lambda x: x @ weight.T, 6), Head(lambda x: x @ ref_weight.T, 6)
    logits, ref_logits = hidden @ weight.T, ref @ ref_weight.T
    expected = logprobs_and_kl(logits, ref_logits, ids, 0.7)
    found = token_kl(hidden, head, ids, ref, ref_head, 0.7)
    alone = token_logprobs(hidden, head, ids, 0.7)
    for one, other in zip((*found, alone), (*expected, chosen_logprobs(logits, ids, 0.7)), strict=True):
        torch.testing.assert_close(one, other)
    weights = torch.linspace(-1, 1, 7)
    gradients = [
        torch.autograd.grad((weights * logprobs).sum() + kl.sum(), (hidden, weight))
        for logprobs, kl in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    stats = token_stats(hidden, head, ids, ref, ref_head, 0.7)
    for one, other in zip(stats, compare_distributions(logits, ref_logits, ids, 0.7), strict=True):
        torch.testing.assert_close(one, other)
    assert not stats.exact_kl.requires_grad
