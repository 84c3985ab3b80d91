"""Every estimator against enumeration over a vocabulary of seven."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rlhf_kl.ops.advantages import gae
from rlhf_kl.ops.kl import (
    ESTIMATORS,
    estimate_kl,
    kl_of_next_states,
    kl_penalty,
    last_token,
    rewards_with_kl,
    shape_rewards,
)
from rlhf_kl.ops.logprobs import exact_kl

Pair = tuple[Tensor, Tensor]


def pair(distance: float, seed: int = 0) -> Pair:
    """Log-probs (7,) of a policy and a reference; the larger `distance`, the further apart."""
    noise = torch.Generator().manual_seed(seed)
    reference = torch.randn(7, generator=noise, dtype=torch.float64)
    policy = reference + distance * torch.randn(7, generator=noise, dtype=torch.float64)
    return policy.log_softmax(-1), reference.log_softmax(-1)


def truth(logp: Tensor, logq: Tensor) -> float:
    return float(kl_divergence(Categorical(logits=logp), Categorical(logits=logq)))


def expected(estimator: str, logp: Tensor, logq: Tensor, under: Tensor | None = None) -> float:
    """The estimator's mean over tokens drawn from the policy (or from `under`)."""
    return float(((logp if under is None else under).exp() * estimate_kl(logp, logq, estimator)).sum())


@pytest.mark.parametrize("distance", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str, distance: float) -> None:
    assert expected(estimator, *pair(distance)) == pytest.approx(truth(*pair(distance)), abs=1e-12)


def test_k2_is_right_near_the_reference_and_biased_away_from_it() -> None:
    near, far = pair(0.02), pair(1.5)
    assert expected("k2", *near) == pytest.approx(truth(*near), rel=0.05)
    assert abs(expected("k2", *far) / truth(*far) - 1) > 0.1


@pytest.mark.parametrize("distance", [0.05, 1.5])
def test_importance_is_unbiased_for_tokens_of_the_reference_only(distance: float) -> None:
    logp, logq = pair(distance)
    assert expected("importance", logp, logq, under=logq) == pytest.approx(truth(logp, logq), abs=1e-12)
    assert expected("importance", logp, logq) > 2 * truth(logp, logq)


def test_importance_over_the_policys_own_tokens_is_three_times_too_high_at_a_tiny_kl() -> None:
    logp, logq = pair(1e-3)
    assert expected("importance", logp, logq) / truth(logp, logq) == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_no_sample_is_below_zero(estimator: str) -> None:
    assert (estimate_kl(*pair(1.0), estimator) >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_are_zero_apart(estimator: str) -> None:
    logp, _ = pair(1.0)
    assert torch.equal(estimate_kl(logp, logp, estimator), torch.zeros(7, dtype=torch.float64))


def test_k3_keeps_its_digits_near_zero() -> None:
    """exp(-lr) - 1 + lr in float32 loses all digits at lr = 1e-4 unless the difference is taken with care."""
    lr = torch.full((1,), 1e-3)
    assert float(estimate_kl(lr, torch.zeros(1), "k3")) == pytest.approx(5e-7, rel=1e-2)


def spread(estimator: str, logp: Tensor, logq: Tensor) -> float:
    mean = expected(estimator, logp, logq)
    return float((logp.exp() * (estimate_kl(logp, logq, estimator) - mean) ** 2).sum().sqrt())


def test_k3_is_less_noisy_than_k1_near_the_reference() -> None:
    assert spread("k3", *pair(0.1)) < 0.3 * spread("k1", *pair(0.1))


def test_an_unknown_estimator_and_exact_are_refused() -> None:
    logp, logq = pair(1.0)
    with pytest.raises(ValueError, match="k4"):
        estimate_kl(logp, logq, "k4")
    with pytest.raises(ValueError, match="differ in shape"):
        exact_kl(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="exact_kl"):
        estimate_kl(logp, logq, "exact")
    with pytest.raises(ValueError, match="differ"):
        estimate_kl(logp, logq[:3])


SCORES = torch.tensor([1.0, 0.5, -0.2, 0.8])
LOGPROBS = torch.tensor([-2.0, -2.5, -3.0, -2.2])
REFERENCE = torch.tensor([-2.1, -2.3, -2.8, -2.5])


def test_the_golden_example() -> None:
    rewards, kl = rewards_with_kl(SCORES, LOGPROBS, REFERENCE, 0.1)
    torch.testing.assert_close(kl, torch.tensor([0.10, -0.20, -0.20, 0.30]))
    torch.testing.assert_close(rewards, torch.tensor([0.99, 0.52, -0.18, 0.77]))
    assert float(kl_penalty(LOGPROBS, REFERENCE, 0.1)) == pytest.approx(0.0, abs=1e-7)
    assert float(kl_penalty(LOGPROBS, REFERENCE, 0.5, "k2")) == pytest.approx(0.01125)


def test_a_score_per_response_lands_on_its_last_token() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -1.0, 0.0], [-1.0, -1.0, -3.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards, kl = rewards_with_kl(torch.tensor([5.0, -5.0]), logprobs, reference, 0.2, mask=mask)
    torch.testing.assert_close(kl, torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 2.0]]))
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5.2, 0.0], [0.0, 0.0, -5.4]]))


def test_the_penalty_is_a_mean_over_the_policys_tokens() -> None:
    logprobs = torch.tensor([[1.0, 2.0, torch.nan], [3.0, -torch.inf, 50.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert float(kl_penalty(logprobs, torch.zeros(2, 3), 0.5, mask=mask)) == pytest.approx(1.0)


def test_the_penalty_carries_a_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_penalty(logprobs, REFERENCE, 2.0, "k2").backward()
    torch.testing.assert_close(logprobs.grad, 2.0 * (LOGPROBS - REFERENCE) / 4)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_padding_has_no_gradient_however_far_apart_its_log_probs_are(estimator: str) -> None:
    """A fill value on one side once gave a finite penalty and a gradient of NaN."""
    logprobs = torch.tensor([-1.0, -100.0], requires_grad=True)
    mask = torch.tensor([True, False])
    kl_penalty(logprobs, torch.tensor([-1.5, 3.0]), 0.1, estimator, mask).backward()
    alone = torch.tensor([-1.0], requires_grad=True)
    kl_penalty(alone, torch.tensor([-1.5]), 0.1, estimator).backward()
    assert logprobs.grad is not None
    assert alone.grad is not None
    assert logprobs.grad.tolist() == [*alone.grad.tolist(), 0.0]


def test_scores_and_log_probs_must_fit() -> None:
    wide = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="mask"):
        rewards_with_kl(SCORES, wide, wide, 0.1)
    with pytest.raises(ValueError, match="fit neither"):
        rewards_with_kl(torch.zeros(3), wide, wide, 0.1, mask=torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="differ"):
        rewards_with_kl(SCORES, LOGPROBS, REFERENCE[:3], 0.1)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 1)])
def test_a_mask_of_another_shape_is_refused_and_not_broadcast(shape: tuple[int, ...]) -> None:
    wide, mask = torch.ones(4, 3), torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask"):
        kl_penalty(wide, torch.zeros(4, 3), 1.0, mask=mask)
    with pytest.raises(ValueError, match="mask"):
        rewards_with_kl(SCORES, wide, torch.zeros(4, 3), 1.0, mask=mask)


MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
KL = torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0], [9.0, 9.0, 9.0]])


def test_the_score_lands_on_the_last_token_and_every_token_pays() -> None:
    rewards = shape_rewards(torch.tensor([10.0, -1.0, 5.0]), KL, MASK, coef=0.5)
    expected = torch.tensor([[-0.05, -0.1, 9.85], [-1.2, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_the_sum_of_a_row_is_the_score_less_the_sequence_kl() -> None:
    noise = torch.Generator().manual_seed(0)
    scores, kl = torch.randn(8, generator=noise), torch.randn(8, 6, generator=noise)
    mask = torch.arange(6) < torch.randint(1, 7, (8, 1), generator=noise)
    total = shape_rewards(scores, kl, mask, 0.3).sum(1)
    torch.testing.assert_close(total, scores - 0.3 * torch.where(mask, kl, 0.0).sum(1))


def test_a_kl_that_is_not_a_number_outside_the_mask_does_no_harm() -> None:
    rewards = shape_rewards(torch.zeros(3), torch.where(MASK, KL, torch.nan), MASK, 1.0)
    assert rewards.isfinite().all()


def test_where_the_last_token_is() -> None:
    assert last_token(MASK).tolist() == [2, 0, 0]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_each_token_answers_for_the_state_it_leads_to_discounted_by_one_step(gamma: float) -> None:
    moved = kl_of_next_states(KL, MASK, gamma)
    torch.testing.assert_close(moved, gamma * torch.tensor([[0.2, 0.3, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))


def test_the_return_from_the_first_token_worked_by_hand() -> None:
    """Two states later on pay 0.2 and 0.3 nats: at gamma 0.5 they count 0.5 and 0.25 from the first token."""
    rewards = shape_rewards(torch.zeros(3), kl_of_next_states(KL, MASK, 0.5), MASK, coef=1.0)
    returns, _ = gae(rewards, torch.zeros_like(rewards), MASK, 0.5, 1.0)
    assert returns[0].tolist() == pytest.approx([-0.175, -0.15, 0.0])
