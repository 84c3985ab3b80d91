from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_kl.ops.advantages import gae


def left_run(*lengths: int, width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    mask = left_run(5, 1, 3, width=5)
    return torch.randn(3, 5, generator=noise), torch.randn(3, 5, generator=noise), mask


def test_lambda_one_is_reward_to_go_less_the_value(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards, values, mask = batch
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    for row, length in enumerate((5, 1, 3)):
        for t in range(length):
            to_go = sum(0.9 ** (s - t) * float(rewards[row, s]) for s in range(t, length))
            assert float(returns[row, t]) == pytest.approx(to_go, abs=1e-5)
            assert float(advantages[row, t]) == pytest.approx(to_go - float(values[row, t]), abs=1e-5)


def test_lambda_zero_is_the_td_error(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    rewards, values, mask = batch
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    for row, length in enumerate((5, 1, 3)):
        for t in range(length):
            after = float(values[row, t + 1]) if t + 1 < length else 0.0
            error = float(rewards[row, t]) + 0.9 * after - float(values[row, t])
            assert float(advantages[row, t]) == pytest.approx(error, abs=1e-6)


def test_a_table_worked_by_hand() -> None:
    # gamma 0.5, lambda 0.5. delta: 1 + 0.5*4 - 2 = 1; 0 + 0.5*(-2) - 4 = -5; 6 - (-2) = 8.
    # A3 = 8; A2 = -5 + 0.25*8 = -3; A1 = 1 + 0.25*(-3) = 0.25.
    rewards, values = torch.tensor([[1.0, 0.0, 6.0]]), torch.tensor([[2.0, 4.0, -2.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.25, -3.0, 8.0]]
    assert returns.tolist() == [[2.25, 1.0, 6.0]]


def test_nothing_outside_the_mask_counts_and_nothing_is_written_there(
    batch: tuple[Tensor, Tensor, Tensor],
) -> None:
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
