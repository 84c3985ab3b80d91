from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.config.schema.supervised import RewardModelSection
from rlhf_kl.data.texts import Example, Pair
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import load_causal_lm, load_tokenizer
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.supervised.figures import pair_figures
from rlhf_kl.supervised.loop import SupervisedTrainer
from rlhf_kl.supervised.tasks import PairTask, ResponseTask, TextTask
from tests.made import Make

EXAMPLES = [Example("ab", "cd"), Example("d", "abc"), Example("cc", "")]


def test_only_the_response_and_its_eos_are_learned(new_model: Make, letters: Any) -> None:
    """transformers computes the same where the prompt's labels are -100."""
    model = new_model()
    task = ResponseTask(LM(model), letters, EXAMPLES)
    assert task.rows == [[1, 3, 4, 5, 6, 2], [1, 6, 3, 4, 5, 2], [1, 5, 5, 2]]
    assert task.weights == [3.0, 4.0, 1.0]
    for i, row in enumerate(task.rows):
        learned = int(task.weights[i])
        labels = torch.tensor([[-100] * (len(row) - learned) + row[-learned:]])
        mean = model(input_ids=torch.tensor([row]), labels=labels).loss
        torch.testing.assert_close(task.loss([i])[0], mean * learned)
    alone = sum(task.loss([i])[0] for i in range(3))
    torch.testing.assert_close(task.loss([2, 0, 1])[0], alone)


def test_a_prompt_that_fills_the_context_is_left_out_and_a_long_response_cut(new_model: Make, letters: Any) -> None:
    rows = [Example("abcd", "a"), Example("ab", "cdcd"), Example("a", "b")]
    task = ResponseTask(LM(new_model(context=5)), letters, rows)
    assert task.rows == [[1, 3, 4, 5, 6], [1, 3, 4, 2]]
    assert task.notes == [
        "1 of 3 responses are longer than the context and are cut off",
        "1 of 3 rows left out: their prompts fill the context",
    ]
    with pytest.raises(InputError, match="fill the context of 5"):
        ResponseTask(LM(new_model(context=5)), letters, rows[:1])


def test_a_turn_of_a_chat_ends_with_its_first_eos(new_model: Make, letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<eos>d{% endfor %}{% if add_generation_prompt %}c{% endif %}"
    )
    task = ResponseTask(LM(new_model()), chatty, [Example("a", "b")], chat=True)
    # What the template writes behind a turn's end is not learned; where its answer does not go on from its prompt
    # (it leaves out the c here), the response follows the prompt as a rollout has it.
    assert task.rows == [[3, 2, 6, 5, 4, 2]]
    assert task.starts == [4]


def test_the_loss_is_that_of_transformers_over_text_and_eos(new_model: Make, letters: Any) -> None:
    model = new_model()
    task = TextTask(LM(model), letters, ["abcd", "b"])
    rows = [[1, 3, 4, 5, 6, 2], [1, 4, 2]]
    assert task.rows == rows
    for i, row in enumerate(rows):
        ids = torch.tensor([row])
        mean = model(input_ids=ids, labels=ids).loss
        total, _ = task.loss([i])
        assert task.weights[i] == len(row) - 1
        torch.testing.assert_close(total, mean * (len(row) - 1))


def test_long_texts_are_cut_and_counted(new_model: Make, letters: Any) -> None:
    task = TextTask(LM(new_model(context=4)), letters, ["abcd", "ab", "abc"])
    assert task.rows == [[1, 3, 4, 5], [1, 3, 4, 2], [1, 3, 4, 5]]
    assert task.notes == ["2 of 3 texts are longer than the context and are cut off"]
    assert task.lengths == [4, 4, 4]
    assert float(task.loss([0, 1, 2])[0].detach()) > 0


WORDS = ["".join(word) for word in itertools.product("abc", repeat=3) if "a" in word]
EVERY = [Pair(prompt, good, good.replace("a", "d")) for prompt in ("b", "cd") for good in WORDS]
UNSEEN, PAIRS = EVERY[::5], [pair for i, pair in enumerate(EVERY) if i % 5]


@pytest.fixture
def reward(tiny_folder: Path) -> RewardModel:
    tokenizer = load_tokenizer(str(tiny_folder))
    model = classifier_from_lm(load_causal_lm(str(tiny_folder)), tokenizer)
    initialise_head(model.score, seed=0)
    return RewardModel(model, tokenizer)


def figures(reward: RewardModel, pairs: list[Pair]) -> dict[str, float]:
    prompts = [pair.prompt for pair in pairs]
    return pair_figures(*(reward.score(prompts, [getattr(p, side) for p in pairs]) for side in ("chosen", "rejected")))


def test_it_learns_to_prefer_a_letter_in_texts_it_has_not_seen(reward: RewardModel) -> None:
    settings = RewardModelSection(epochs=15.0, batch_size=10, microbatch_size=5, learning_rate=3e-3)
    trainer = SupervisedTrainer(PairTask(reward, PAIRS), settings, 0)
    rows = [trainer.step(step) for step in range(1, trainer.steps + 1)]
    assert rows[-1]["train/loss"] < 0.2 < rows[0]["train/loss"]
    assert rows[-1]["train/accuracy"] == 1.0
    assert figures(reward, UNSEEN)["eval/accuracy"] == 1.0


def test_equal_scores_cost_log_two(reward: RewardModel) -> None:
    nn.init.zeros_(reward.model.score.weight)
    loss, sums = PairTask(reward, PAIRS).loss([0, 1, 2])
    assert float(loss.detach()) == pytest.approx(3 * math.log(2))
    assert sums == {"train/accuracy": 0.0}
