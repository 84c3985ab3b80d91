from __future__ import annotations

import pytest
import torch

from rlhf_kl.ops.advantages import gae
from rlhf_kl.ops.kl import kl_of_next_states, last_token, shape_rewards

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
