"""Against torch in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rlhf_kl.kernels.logits import ChosenLogprobs, HeadLogits, sample
from rlhf_kl.ops.logprobs import chosen_logprobs

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("rows", [0, 1, 12, 500])
@pytest.mark.parametrize("vocabulary", [5, 7, 64, 133])
def test_logits_and_their_gradients(rows: int, vocabulary: int) -> None:
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 48, generator=noise, requires_grad=True)
    head = torch.randn(vocabulary, 48, generator=noise, requires_grad=True)
    weight = torch.randn(rows, vocabulary, generator=noise)
    logits = HeadLogits.apply(hidden, head)
    expected = F.linear(hidden.double(), head.double())
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)
    found = torch.autograd.grad(logits, (hidden, head), weight)
    for own, theirs in zip(found, torch.autograd.grad(expected, (hidden, head), weight.double()), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 829])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 300.0])
def test_logprobs_and_their_gradient(vocabulary: int, temperature: float, spread: float) -> None:
    noise = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, vocabulary, generator=noise) * spread).requires_grad_()
    ids, weight = torch.randint(vocabulary, (40,), generator=noise), torch.randn(40, generator=noise)
    found = ChosenLogprobs.apply(logits, ids, temperature)
    exact = torch.log_softmax(logits.double() / temperature, -1).gather(1, ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)
    (own,) = torch.autograd.grad(found, logits, weight)
    (theirs,) = torch.autograd.grad(exact, logits, weight.double())
    torch.testing.assert_close(own, theirs.float(), rtol=1e-5, atol=2e-6)


def test_forbidden_tokens_and_numbers_that_are_not_finite() -> None:
    logits = torch.tensor(
        [[0.0, -math.inf, 0.0], [1.0, -math.inf, -math.inf], [math.nan, 0.0, 0.0], [0.0, math.inf, 0.0]]
    )
    found = ChosenLogprobs.apply(logits, torch.tensor([0, 0, 1, 1]), 1.0)
    torch.testing.assert_close(found[:2], torch.tensor([-math.log(2.0), 0.0]))
    assert not found[2:].isfinite().any()


def test_log_probs_of_flat_logits_are_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, of another dtype or shape, by torch: and both say the same."""
    asked = []
    own = ChosenLogprobs.forward
    monkeypatch.setattr(ChosenLogprobs, "forward", lambda *a: (asked.append(1), own(*a))[1])
    logits, ids = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    flat = chosen_logprobs(logits, ids)
    assert asked == [1]
    for other in (logits.view(2, 3, 5), logits.t().contiguous().t()):
        torch.testing.assert_close(chosen_logprobs(other, ids.view(other.shape[:-1])).flatten(), flat)
    torch.testing.assert_close(chosen_logprobs(logits.double(), ids), flat)
    assert asked == [1]


@pytest.mark.parametrize("ids", [[7, 0], [-1, 0], [0], [0, 0, 0]])
def test_ids_beyond_the_vocabulary_or_of_another_number(ids: list[int]) -> None:
    with pytest.raises(IndexError):
        ChosenLogprobs.apply(torch.randn(2, 7), torch.tensor(ids), 1.0)


def test_ids_of_fewer_bits() -> None:
    logits, ids = torch.randn(3, 7), torch.tensor([1, 6, 0])
    assert torch.equal(ChosenLogprobs.apply(logits, ids.int(), 1.0), ChosenLogprobs.apply(logits, ids, 1.0))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 130])
def test_tokens_are_where_the_cumulative_probability_passes_the_number(vocabulary: int, temperature: float) -> None:
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(300, vocabulary, generator=noise) * 3
    logits[:, ::4] = -math.inf if vocabulary > 4 else 0.0
    uniform = torch.rand(300, dtype=torch.float64, generator=noise)
    ids = sample(logits, uniform, temperature)
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    above = cumulative.gather(1, ids.unsqueeze(1)).squeeze(1)
    below = above - torch.softmax(logits.double() / temperature, -1).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert bool((below <= uniform + 1e-6).all())
    assert bool((uniform <= above + 1e-6).all())


def test_no_number_draws_a_forbidden_token() -> None:
    """At the ends of the unit interval, and behind tokens that are certain."""
    logits = torch.full((3, 40), -math.inf)
    logits[:, [3, 20]] = torch.tensor([0.0, 0.0])
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53, 0.75], dtype=torch.float64)
    assert sample(logits, uniform, 1.0).tolist() == [3, 20, 20]
    ends = torch.full((200,), 1.0 - 2.0**-53, dtype=torch.float64)
    many = torch.full((200, 40), -math.inf)
    many[:, [3, 20]] = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    assert set(sample(many, ends, 1.0).tolist()) == {20}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_draw_some_token(bad: float) -> None:
    ids = sample(torch.full((3, 21), bad), torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), 1.0)
    assert bool(((ids >= 0) & (ids < 21)).all())
