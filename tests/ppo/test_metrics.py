from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.ops.logprobs import compare_distributions
from rlhf_kl.ops.masked import mean_of_groups
from rlhf_kl.ppo.metrics import rollout_metrics, sampling_gap, update_row
from rlhf_kl.ppo.settings import PPOSettings
from rlhf_kl.ppo.step import Update
from rlhf_kl.training.trainer import ppo_settings
from rlhf_kl.types import RolloutBatch
from tests.made import Make, rollout

MASK = torch.tensor([[True, True, False], [True, False, False]])


def padded(first: float, second: float, other: float) -> torch.Tensor:
    """Of the three tokens; padding counts for nothing, whatever it holds."""
    return torch.tensor([[first, second, math.nan], [other, math.nan, math.nan]])


BATCH = rollout(
    MASK,
    logprobs=padded(-1.0, -2.0, -1.0),
    ref_logprobs=padded(-1.5, -1.0, -3.0),
    exact_kl=padded(0.1, 0.3, 0.5),
    entropy=padded(1.0, 2.0, 3.0),
    k1_variance=padded(0.25, 1.0, 4.0),
    logprob_variance=padded(1.0, 2.0, 3.0),
    scores={"reward": torch.tensor([1.0, 3.0]), "terms.length": torch.tensor([0.25, 0.75])},
    shaped_scores=torch.tensor([0.5, 1.5]),
    ended=torch.tensor([True, False]),
    responses=["c", "d"],
    penalties={"missing_eos": torch.tensor([0.0, 1.0])},
)
OF_ROLLOUTS = ("policy/entropy", "policy/logprob_gap", "policy/logprob_gap_stderr")


def made(**sections: Any) -> PPOSettings:
    return ppo_settings(TrainConfig.model_validate(sections))


def config(target: float = 0.1, unit: str = "token") -> PPOSettings:
    return made(kl={"target": target, "unit": unit, "ceiling": None})


@pytest.mark.parametrize(
    ("prompts", "responses", "size", "share"),
    [
        ("abcd", "wxyz", 1, 1.0),
        ("abcd", "wwww", 1, 0.25),
        ("aabb", "wwzz", 2, 1.0),  # two responses to each prompt, which agree
        ("aabb", "wzww", 2, 0.75),  # w and w, z and w
        ("aabb", "wxyz", 1, 1.0),  # a prompt that comes twice
    ],
)
def test_different_texts_of_a_batch(prompts: str, responses: str, size: int, share: float) -> None:
    batch = rollout(torch.ones(4, 1, dtype=torch.bool), prompts=list(prompts), responses=list(responses))
    settings = made(rollout={"batch_size": 4, "samples_per_prompt": size})
    assert rollout_metrics(batch, 0.5, settings)["rollout/distinct_responses"] == share


def test_a_batch_worked_by_hand() -> None:
    row = rollout_metrics(BATCH, 0.5, config())
    wanted: dict[str, Any] = {
        "objective/scores": 2.0,
        "objective/scores_std": 1.0,
        "objective/scores_shaped": 1.0,
        "objective/rlhf_reward": 1.0 - 0.5 * 0.45,
        "objective/kl_share": 0.225 / 1.225,  # beta * sequence KL beside the score
        "kl/token": 0.3,  # (0.1 + 0.3 + 0.5) / 3 tokens
        "kl/sequence": 0.45,  # (0.4 + 0.5) / 2 responses
        "kl/sequence_stderr": 0.05,  # 0.4 and 0.5: spread 0.1 / sqrt(2), over sqrt(2)
        "kl/max_token": 0.5,
        "kl/p95_token": 0.3 + 0.9 * 0.2,  # nine tenths of the way from the second token to the third
        "kl/max_sequence": 0.5,
        "kl/target": 0.1,
        "kl/error": 2.0,
        "kl/k1": (0.5 - 1.0 + 2.0) / 3,
        "kl/k2": (0.125 + 0.5 + 2.0) / 3,
        "kl/k3": (math.exp(-0.5) - 0.5 + math.exp(1) - 2 + math.exp(-2) + 1) / 3,
        "kl/k1_gap": (0.5 - 1.0 + 2.0) / 3 - 0.3,
        # gaps of 0.4, -1.3 and 1.5 nats; the variances sum to 5.25
        "kl/k1_gap_stderr": math.sqrt((0.16 + 1.69 + 2.25 + 2 * 5.25) / 3) / 3,
        "policy/logprob_gap": (0.0 + 0.0 + 2.0) / 3,
        "policy/logprob_gap_stderr": math.sqrt((4.0 + 2 * 6.0) / 3) / 3,
        "policy/entropy": 2.0,
        "rollout/tokens": 3,
        "rollout/response_length": 1.5,
        "rollout/eos_rate": 0.5,
        "reward/length": 0.5,
        "penalty/missing_eos": 0.5,
    }
    for key, value in wanted.items():
        assert row[key] == pytest.approx(value, rel=1e-5), key
    assert rollout_metrics(BATCH, 0.5, config(0.9, "sequence"))["kl/error"] == pytest.approx(-0.5)


def test_the_standard_error_is_the_spread_of_repeated_means() -> None:
    """Tokens of a row are correlated and lengths differ; 2000 repeated batches."""
    noise = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(2000):
        mask = torch.arange(6) < torch.randint(1, 7, (40, 1), generator=noise)
        values = torch.randn(40, 1, generator=noise) + 0.3 * torch.randn(40, 6, generator=noise)
        mean, error = mean_of_groups((values * mask).sum(1), mask.sum(1))
        means.append(mean)
        errors.append(error)
    assert sum(errors) / len(errors) == pytest.approx(float(torch.tensor(means).std()), rel=0.08)


def columns(batch: RolloutBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def test_one_response_has_no_standard_error() -> None:
    alone = {name: value[:1] for name, value in columns(BATCH).items() if isinstance(value, torch.Tensor | list)}
    row = rollout_metrics(
        replace(BATCH, **alone, scores={"reward": BATCH.scores["reward"][:1]}, penalties={}), 0.5, config()
    )
    names = ("kl/token_stderr", "kl/sequence_stderr", "kl/k1_stderr", "objective/scores_stderr")
    assert {row[key] for key in names} == {None}


def test_responses_to_one_prompt_are_one_draw() -> None:
    """Two groups whose responses are the same: errors are those of two responses. In one group the responses are."""
    names = [name for name, value in columns(BATCH).items() if isinstance(value, torch.Tensor)]
    twice: dict[str, Any] = {name: getattr(BATCH, name).repeat_interleave(2, 0) for name in names}
    twice["scores"] = {"reward": BATCH.scores["reward"].repeat_interleave(2, 0)}
    kl = {"target": 0.1, "ceiling": None}
    in_twos = made(kl=kl, ppo={"advantage": "rloo"}, rollout={"samples_per_prompt": 2})
    keys = ("kl/token_stderr", "kl/sequence_stderr", "kl/k1_stderr", "objective/scores_stderr")
    once, row = (
        rollout_metrics(replace(BATCH, **tensors, penalties={}, group=group), 0.5, settings)
        for tensors, group, settings in (({}, 1, config()), (twice, 2, in_twos))
    )
    assert [row[key] for key in keys] == pytest.approx([once[key] for key in keys])
    alone = rollout_metrics(replace(BATCH, penalties={}, group=2), 0.5, in_twos)
    assert [alone[key] for key in keys] == [once[key] for key in keys]


def test_the_row_of_an_update_that_was_left_out_has_the_same_keys(make_trainer: Make) -> None:
    """A NaN where nothing was trained; beta stays."""
    trainer = make_trainer()
    update = trainer.update(1)
    row = update_row(update, trainer.settings)
    left_out = update_row(Update(update.rollout, 0.3, 0.3, math.nan), trainer.settings)
    assert left_out.keys() == row.keys()
    unknown = {key for key, value in left_out.items() if isinstance(value, float) and math.isnan(value)}
    of_steps = {key for key in row if key.startswith(("policy/", "value/")) and key not in OF_ROLLOUTS}
    assert unknown == {*of_steps, "kl/after_update"} - {"policy/epochs"}
    assert (left_out["kl/coef"], left_out["kl/coef_next"], left_out["kl/backtrack_factor"]) == (0.3, 0.3, 1.0)
    assert left_out["kl/token"] == row["kl/token"]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_shift_at_another_temperature_is_that_of_the_closed_form(temperature: float) -> None:
    """One state with four tokens, drawn 40,000 times; the figures' means over the vocabulary are known."""
    logits, ref_logits = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 0.0, 0.5])
    p, q, drawn = (x.double().softmax(-1) for x in (logits, ref_logits, logits / temperature))
    ids = torch.multinomial(drawn, 40_000, replacement=True, generator=torch.Generator().manual_seed(0)).view(-1, 4)
    stats = compare_distributions(logits.expand(*ids.shape, 4), ref_logits.expand(*ids.shape, 4), ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for x, gaps, variance in (
        (p.log(), stats.logprobs + stats.entropy, stats.logprob_variance),
        (p.log() - q.log(), stats.logprobs - stats.ref_logprobs - stats.exact_kl, stats.k1_variance),
    ):
        gap, error = sampling_gap(gaps, variance, mask)
        own = float((p * x).sum())
        assert gap == pytest.approx(float((drawn * x).sum()) - own, abs=4 * error)
        squares = float((drawn * (x - own) ** 2).sum() + 2 * (p * (x - own) ** 2).sum()) / 3
        assert error == pytest.approx(math.sqrt(squares / 40_000), rel=0.02)


def test_the_mean_shaped_score_leaves_out_what_has_none() -> None:
    scores = {"reward": torch.tensor([1.0, math.nan]), "terms.length": torch.tensor([0.25, math.nan])}
    batch = replace(BATCH, scores=scores, shaped_scores=torch.tensor([4.0, 0.0]))
    row = rollout_metrics(batch, 0.5, config())
    assert row["objective/scores"] == 1.0
    assert row["objective/scores_shaped"] == 4.0
    assert row["reward/length"] == 0.25


def test_the_gap_to_the_log_probs_of_an_engine_is_told() -> None:
    drawn = padded(-1.1, -2.0, -3.0)  # of tokens at -1, -2 and -1: the last is 7.4 times as likely
    with_engine = made(rollout={"engine": "vllm"})
    row = rollout_metrics(replace(BATCH, drawn=drawn), 0.5, with_engine)
    assert row["rollout/engine_gap"] == pytest.approx(0.7)
    assert row["rollout/engine_gap_max"] == pytest.approx(2.0)
    assert row["rollout/engine_cut"] == pytest.approx(1 / 3)
    assert "rollout/engine_gap" not in rollout_metrics(BATCH, 0.5, config())
