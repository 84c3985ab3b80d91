from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.config.schema import RewardModelSection
from rlhf_kl.data.texts import Pair
from rlhf_kl.models.load import load_causal_lm, load_tokenizer
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.trainers.reward_figures import pair_figures
from rlhf_kl.trainers.supervised import SupervisedTrainer
from rlhf_kl.trainers.tasks import PairTask

WORDS = ["".join(word) for word in itertools.product("abc", repeat=3) if "a" in word]
EVERY = [Pair(prompt, good, good.replace("a", "d")) for prompt in ("b", "cd") for good in WORDS]
UNSEEN, PAIRS = EVERY[::5], [pair for i, pair in enumerate(EVERY) if i % 5]


@pytest.fixture
def reward(tiny_folder: Path) -> RewardModel:
    tokenizer = load_tokenizer(str(tiny_folder))
    model = classifier_from_lm(load_causal_lm(str(tiny_folder)), tokenizer, "policy.model")
    initialise_head(model.score, seed=0)
    return RewardModel(model, tokenizer)


def figures(reward: RewardModel, pairs: list[Pair]) -> dict[str, float]:
    prompts = [pair.prompt for pair in pairs]
    return pair_figures(*(reward(prompts, [getattr(p, side) for p in pairs]) for side in ("chosen", "rejected")))


def test_it_learns_to_prefer_a_letter_in_texts_it_has_not_seen(reward: RewardModel) -> None:
    settings = RewardModelSection(epochs=15.0, batch_size=10, microbatch_size=5, learning_rate=3e-3)
    rows = list(SupervisedTrainer(PairTask(reward, PAIRS), settings, 0).train())
    assert rows[-1]["train/loss"] < 0.2 < rows[0]["train/loss"]
    assert rows[-1]["train/accuracy"] == 1.0
    assert figures(reward, UNSEEN)["eval/accuracy"] == 1.0


def test_equal_scores_cost_log_two(reward: RewardModel) -> None:
    nn.init.zeros_(reward.model.score.weight)
    loss, sums = PairTask(reward, PAIRS).loss([0, 1, 2])
    assert float(loss.detach()) == pytest.approx(3 * math.log(2))
    assert sums == {"train/accuracy": 0.0}


def test_the_loss_of_a_batch_is_the_sum_of_its_pairs(reward: RewardModel) -> None:
    task = PairTask(reward, PAIRS)
    alone = sum(task.loss([i])[0] for i in (0, 4, 8))
    torch.testing.assert_close(task.loss([8, 0, 4])[0], alone, rtol=1e-4, atol=1e-5)
    assert task.size(4) == len(PAIRS[4].prompt) + 3 + 2  # with bos and eos
    assert {task.weight(i) for i in range(len(task))} == {1.0}


def test_held_out_figures_come_from_the_scores(reward: RewardModel) -> None:
    scores: dict[str, Any] = {
        side: reward([p.prompt for p in PAIRS], [getattr(p, side) for p in PAIRS]) for side in ("chosen", "rejected")
    }
    right = (scores["chosen"] > scores["rejected"]).float().mean()
    found = figures(reward, PAIRS)
    assert found["eval/accuracy"] == pytest.approx(float(right))
    turned = figures(reward, [Pair(p.prompt, p.rejected, p.chosen) for p in PAIRS])
    assert turned["eval/accuracy"] == pytest.approx(1 - float(right))
    margin = float((scores["chosen"] - scores["rejected"]).mean())
    # log(1 + e^-x) - log(1 + e^x) = -x
    assert found["eval/loss"] - turned["eval/loss"] == pytest.approx(-margin, abs=1e-4)


def test_a_head_starts_small_and_the_same_for_a_seed() -> None:
    heads = [nn.Linear(999, 1) for _ in range(3)]
    for head, seed in zip(heads, (1, 1, 2), strict=True):
        initialise_head(head, seed)
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[0].weight, heads[2].weight)
    assert float(heads[0].weight.detach().std()) == pytest.approx(1000**-0.5, rel=0.1)
    assert float(heads[0].bias.detach()) == 0.0
