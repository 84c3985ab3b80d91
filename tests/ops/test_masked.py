from __future__ import annotations

import pytest
import torch

from rlhf_kl.ops.masked import masked_mean, masked_std, masked_sum, whiten

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
