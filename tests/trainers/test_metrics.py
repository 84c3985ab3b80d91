from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_kl.run.alerts import KLAlerts
from rlhf_kl.trainers.metrics import Gathered, rollout_metrics, token_mean_stderr

MASK = torch.tensor([[True, True, False], [True, False, False]])
KL = torch.tensor([[0.1, 0.3, 9.0], [0.5, 9.0, 9.0]])
BATCH = Gathered(
    exact_kl=KL,
    logprobs=torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]]),
    ref_logprobs=torch.tensor([[-1.5, -1.0, 0.0], [-3.0, 0.0, 0.0]]),
    entropy=torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]),
    mask=MASK,
    scores=torch.tensor([1.0, 3.0]),
    shaped_scores=torch.tensor([0.5, 1.5]),
    gold=torch.tensor([2.0, 4.0]),
    ended=torch.tensor([True, False]),
)


def test_a_batch_worked_by_hand() -> None:
    row = rollout_metrics(BATCH, coef=0.5, target=0.1, unit="token")
    wanted: dict[str, Any] = {
        "objective/scores": 2.0,
        "objective/scores_std": 1.0,
        "objective/scores_shaped": 1.0,
        "objective/gold": 3.0,
        "objective/rlhf_reward": 1.0 - 0.5 * 0.45,
        "kl/token": 0.3,  # (0.1 + 0.3 + 0.5) / 3 tokens
        "kl/exact": 0.3,
        "kl/sequence": 0.45,  # (0.4 + 0.5) / 2 responses
        "kl/sequence_stderr": 0.05,  # 0.4 and 0.5: spread 0.1 / sqrt(2), over sqrt(2)
        "kl/max_token": 0.5,
        "kl/max_sequence": 0.5,
        "kl/target": 0.1,
        "kl/error": 2.0,
        "kl/k1": (0.5 - 1.0 + 2.0) / 3,
        "kl/k2": (0.125 + 0.5 + 2.0) / 3,
        "kl/k3": (math.exp(-0.5) - 0.5 + math.exp(1) - 2 + math.exp(-2) + 1) / 3,
        "policy/entropy": 2.0,
        "rollout/response_length": 1.5,
        "rollout/eos_rate": 0.5,
    }
    for key, value in wanted.items():
        assert row[key] == pytest.approx(value, rel=1e-5), key
    assert row["kl/per_position"] == pytest.approx([0.3, 0.3])


def test_the_error_is_in_the_targets_unit() -> None:
    assert rollout_metrics(BATCH, 0.5, 0.9, "sequence")["kl/error"] == pytest.approx(-0.5)
    assert rollout_metrics(BATCH, 0.5, None, "token")["kl/error"] is None


def test_padding_counts_for_nothing_whatever_it_holds() -> None:
    dirty = {
        name: torch.where(MASK, getattr(BATCH, name), torch.nan)
        for name in ("exact_kl", "logprobs", "ref_logprobs", "entropy")
    }
    assert rollout_metrics(replace(BATCH, **dirty), 0.5, 0.1, "token") == rollout_metrics(BATCH, 0.5, 0.1, "token")


def test_without_a_gold_scorer_there_is_none() -> None:
    assert rollout_metrics(replace(BATCH, gold=None), 0.5, 0.1, "token")["objective/gold"] is None


def test_the_share_of_the_kl_term() -> None:
    assert rollout_metrics(BATCH, 0.0, 0.1, "token")["objective/kl_share"] == 0.0
    # beta * sequence KL = 1.0 beside a score of 1.0
    assert rollout_metrics(BATCH, 1 / 0.45, 0.1, "token")["objective/kl_share"] == pytest.approx(0.5)


def test_the_standard_error_of_equal_lengths_is_the_textbooks() -> None:
    per_row = torch.tensor([0.1, 0.4, 0.2, 0.7])
    mean, error = token_mean_stderr(per_row.unsqueeze(1).expand(4, 3), torch.ones(4, 3, dtype=torch.bool))
    assert mean == pytest.approx(0.35)
    assert error == pytest.approx(float(per_row.std() / 2))


def test_the_standard_error_is_the_spread_of_repeated_means() -> None:
    """Tokens of a row are correlated and lengths differ; 2000 repeated batches."""
    noise = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(2000):
        mask = torch.arange(6) < torch.randint(1, 7, (40, 1), generator=noise)
        values = torch.randn(40, 1, generator=noise) + 0.3 * torch.randn(40, 6, generator=noise)
        mean, error = token_mean_stderr(values, mask)
        means.append(mean)
        errors.append(error)
    assert sum(errors) / len(errors) == pytest.approx(float(torch.tensor(means).std()), rel=0.08)


def test_one_response_has_no_standard_error_and_nothing_is_told_from_it() -> None:
    fields = {name: value[:1] for name, value in vars(BATCH).items()}
    row = rollout_metrics(Gathered(**fields), 0.5, 0.1, "token")
    assert row["kl/k1"] < 0 < row["kl/exact"]
    assert {key: row[key] for key in row if key.endswith("_stderr")} == dict.fromkeys(
        ("kl/token_stderr", "kl/sequence_stderr", "kl/k1_stderr")
    )
    assert KLAlerts(None)(row) == []


def test_one_response_has_a_finite_error() -> None:
    _, error = token_mean_stderr(KL[:1], MASK[:1])
    assert math.isfinite(error)
