from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlhf_kl.config.schema.training import PPOSection
from rlhf_kl.ops.advantages import ADVANTAGES, gae, grpo, rloo


def left_run(*lengths: int, width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    mask = left_run(5, 1, 3, width=5)
    return torch.randn(3, 5, generator=noise), torch.randn(3, 5, generator=noise), mask


def test_a_table_worked_by_hand() -> None:
    # gamma 0.5, lambda 0.5. delta: 1 + 0.5*4 - 2 = 1; 0 + 0.5*(-2) - 4 = -5; 6 - (-2) = 8.
    # A3 = 8; A2 = -5 + 0.25*8 = -3; A1 = 1 + 0.25*(-3) = 0.25.
    # A row of one token: 5 - 1 = 4.
    rewards, values = (
        torch.tensor([[1.0, 0.0, 6.0], [5.0, 9.0, 9.0]]),
        torch.tensor([[2.0, 4.0, -2.0], [1.0, 7.0, 7.0]]),
    )
    mask = left_run(3, 1, width=3)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.25, -3.0, 8.0], [4.0, 0.0, 0.0]]
    assert returns.tolist() == [[2.25, 1.0, 6.0], [5.0, 0.0, 0.0]]
    # lambda 1: rewards to go, 1 + 0.5*0 + 0.25*6 = 2.5, less the value; lambda 0: delta alone.
    assert gae(rewards, values, mask, gamma=0.5, lam=1.0)[0].tolist() == [[0.5, -1.0, 8.0], [4.0, 0.0, 0.0]]
    assert gae(rewards, values, mask, gamma=0.5, lam=0.0)[0].tolist() == [[1.0, -5.0, 8.0], [4.0, 0.0, 0.0]]


def test_nothing_outside_the_mask_counts_and_nothing_is_written_there(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards, values, mask = batch
    clean = gae(rewards * mask, values * mask, mask, 0.9, 0.8)
    dirty = gae(torch.where(mask, rewards, 1e6), torch.where(mask, values, -1e6), mask, 0.9, 0.8)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
        assert (a[~mask] == 0).all()


def test_wider_padding_and_other_rows_change_nothing(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards, values, mask = batch
    whole = gae(rewards, values, mask, 0.9, 0.8)[0]
    padded = gae(*(torch.nn.functional.pad(x, (0, 4)) for x in batch), 0.9, 0.8)[0]
    assert torch.equal(padded[:, :5], whole)
    alone = gae(rewards[2:, :3], values[2:, :3], mask[2:, :3], 0.9, 0.8)[0]
    assert torch.equal(alone[0], whole[2, :3])


def test_the_inputs_stay_as_they_were(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    copies = [x.clone() for x in batch]
    gae(*batch, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(batch, copies, strict=True))


MASK = left_run(3, 1, 2, 2, width=3)  # two groups of two
PENALTIES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [0.5, 0.5, 9.0], [1.0, 0.0, 9.0]])
EVERY = torch.ones(4, dtype=torch.bool)


def test_rloo_by_hand() -> None:
    """Scores less the other's; penalties to go less the other's at the same place, where it has got that far."""
    advantages, weights = rloo(torch.tensor([3.0, 1.0, 5.0, 5.0]), PENALTIES, MASK, EVERY, 2)
    expected = [[2 - (6 - 4), 2 - 5, 2 - 3], [-2 - (4 - 6), 0, 0], [-(1 - 1), -0.5, 0], [0, 0.5, 0]]
    assert torch.equal(advantages, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(weights, MASK.float())


def test_grpo_by_hand() -> None:
    nothing = torch.zeros_like(PENALTIES)
    scores, mask = torch.tensor([1.0, 2.0, 6.0]), torch.ones(3, 1, dtype=torch.bool)
    scaled, _ = grpo(scores, nothing[:3, :1], mask, EVERY[:3], 3)
    torch.testing.assert_close(scaled.flatten(), torch.tensor([-2.0, -1.0, 3.0]) / (7**0.5 + 1e-4))
    plain, _ = grpo(scores, nothing[:3, :1], mask, EVERY[:3], 3, scale_by_group_std=False)
    assert plain.flatten().tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_penalties_are_not_divided_by_the_spread_of_the_scores(estimator: Callable[..., tuple[Tensor, Tensor]]) -> None:
    scores = torch.tensor([100.0, -100.0, 3.0, 2.0])
    without, _ = estimator(scores, torch.zeros_like(PENALTIES), MASK, EVERY, 2)
    paid, _ = estimator(scores, PENALTIES, MASK, EVERY, 2)
    expected = torch.tensor([[-2.0, -5.0, -3.0], [2.0, 0.0, 0.0], [0.0, -0.5, 0.0], [0.0, 0.5, 0.0]])
    torch.testing.assert_close(paid - without, expected)


@pytest.mark.parametrize("estimator", [rloo, grpo])
def test_a_response_without_a_score_changes_nothing_of_the_others(
    estimator: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    mask, noise = left_run(2, 3, 1, 3, 2, 2, width=3), torch.Generator().manual_seed(0)
    scores, penalties = torch.randn(6, generator=noise), torch.rand(6, 3, generator=noise)
    scored = torch.tensor([True, False, True, True, False, False])
    advantages, weights = estimator(scores, penalties, mask, scored, 3)
    alone, _ = estimator(scores[[0, 2]], penalties[[0, 2]], mask[[0, 2]], scored[[0, 2]], 2)
    torch.testing.assert_close(advantages[[0, 2]], alone)
    assert torch.equal(weights, (mask & scored.unsqueeze(1)).float())
    # The only one of its group with a score has nothing to compare it with, and its KL still counts.
    torch.testing.assert_close(advantages[3], -penalties[3].flip(0).cumsum(0).flip(0))
    assert not advantages[[1, 4, 5]].any()


def test_scores_that_are_all_equal_teach_nothing() -> None:
    """The mean of three times 1000.1 is not 1000.1 in float32."""
    scores, mask = torch.full((3,), 1000.1), torch.ones(3, 1, dtype=torch.bool)
    assert not grpo(scores, torch.zeros(3, 1), mask, EVERY[:3], 3)[0].any()


def test_the_config_names_every_advantage() -> None:
    assert get_args(PPOSection.model_fields["advantage"].annotation) == tuple(ADVANTAGES)
