from __future__ import annotations

import math

import pytest
import torch

from rlhf_kl.ops.losses import bradley_terry_loss, policy_loss, value_loss
from rlhf_kl.ops.masked import all_finite, masked_mean, masked_std, masked_sum, whiten


def surrogate(ratio: float, advantage: float, cliprange: float = 0.2) -> tuple[float, bool, float]:
    """Loss, whether it was clipped, and d loss / d log pi, of one token."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, gain = torch.zeros_like(logprob), torch.full_like(logprob, advantage)
    loss, clipped = policy_loss(logprob, old, gain, cliprange)
    loss.sum().backward()
    assert logprob.grad is not None
    return float(loss.detach()), bool(clipped), float(logprob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # a good token is made no more than 1.2 times as likely
        (0.5, 2.0, -1.0, False),  # it may always be made likelier again
        (0.5, -2.0, 1.6, True),  # a bad one no less than 0.8 times
        (1.5, -2.0, 3.0, False),
    ],
)
def test_the_regions_of_the_clip(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    result, was_clipped, gradient = surrogate(ratio, advantage)
    assert result == pytest.approx(loss)
    assert was_clipped is clipped
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_the_first_gradient_is_that_of_the_policy_gradient() -> None:
    noise = torch.Generator().manual_seed(0)
    logprobs = torch.randn(2, 3, generator=noise).requires_grad_()
    advantages = torch.randn(2, 3, generator=noise)
    policy_loss(logprobs, logprobs.detach(), advantages, 0.2)[0].sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"),
    [
        (1.0, 1.0, 3.0, 2.0),
        (1.1, 1.0, 3.0, 0.5 * 1.9**2),  # within the clip
        (2.5, 1.0, 3.0, 0.5 * 1.8**2),  # clipped to 1.2: the larger loss counts
        (4.0, 1.0, 1.0, 4.5),  # too far is never cheaper for being clipped
    ],
)
def test_the_value_may_not_profit_from_a_long_step(value: float, old: float, target: float, loss: float) -> None:
    result = value_loss(torch.tensor(value), torch.tensor(old), torch.tensor(target), 0.2)
    assert float(result) == pytest.approx(loss)


def test_a_value_beyond_its_clip_has_no_gradient_towards_the_target() -> None:
    value = torch.tensor(2.5, requires_grad=True)
    value_loss(value, torch.tensor(1.0), torch.tensor(3.0), 0.2).backward()
    assert float(value.grad) == 0.0


def test_the_pairwise_loss_counts_the_difference_only() -> None:
    chosen, rejected = torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.0, 1.0, 3.0])
    loss = bradley_terry_loss(chosen, rejected)
    assert float(loss[0]) == pytest.approx(math.log(2))
    # P(wrong order) / P(right order) = exp(difference)
    assert float(loss[2] - loss[1]) == pytest.approx(2.0, abs=1e-6)
    torch.testing.assert_close(bradley_terry_loss(chosen + 7, rejected + 7), loss)
    assert bradley_terry_loss(torch.tensor([-200.0]), torch.tensor([200.0])).isfinite().all()


X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, -100.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])  # keeps 1, 2, 3, 4


def test_sums_means_and_spread_of_the_kept_values() -> None:
    assert float(masked_sum(X, MASK)) == 10.0
    assert float(masked_mean(X, MASK)) == 2.5
    assert float(masked_std(X, MASK)) == pytest.approx(1.25**0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_lies_outside_the_mask_does_not_leak(value: float) -> None:
    dirty = torch.where(MASK, X, value)
    assert float(masked_mean(dirty, MASK)) == 2.5
    assert float(masked_std(dirty, MASK)) == pytest.approx(1.25**0.5)
    assert torch.equal(whiten(dirty, MASK)[0], whiten(X, MASK)[0])


def test_the_mean_of_an_empty_mask_is_nan_and_not_zero() -> None:
    assert masked_mean(X, torch.zeros_like(MASK)).isnan()


def test_a_masked_gradient_reaches_kept_values_only() -> None:
    x = X.clone().requires_grad_()
    masked_mean(x, MASK).backward()
    assert torch.equal(x.grad, MASK * 0.25)


def test_whitened_values_have_mean_zero_and_spread_one() -> None:
    white, std = whiten(X, MASK)
    kept = white[MASK]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert float(std) == pytest.approx(1.25**0.5)
    assert (white[~MASK] == 0).all()


def test_whitening_without_centring_only_scales() -> None:
    white, std = whiten(X, MASK, center=False)
    assert torch.allclose(white[MASK] * std, X[MASK])
    assert float(white[MASK].mean()) > 1.0


def test_a_constant_is_whitened_to_zero_and_stays_finite() -> None:
    white, _ = whiten(torch.full_like(X, 3.0), MASK)
    assert torch.equal(white, torch.zeros_like(X))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_one_number_of_many_is_not_finite(value: float) -> None:
    tensors = [torch.ones(3, 2), torch.zeros(0), torch.ones(()), torch.full((4,), 3e38)]  # whose squares are not
    assert all_finite(iter(tensors))
    tensors[0][2, 1] = value
    assert all_finite(tensors) == math.isfinite(value)
