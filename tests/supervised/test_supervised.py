from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from rlhf_kl.config.schema.supervised import SFTSection
from rlhf_kl.data.rows import Example, Pair
from rlhf_kl.errors import InputError, MemoryFull
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.supervised.figures import calibration_error, histogram, label_figures, pair_figures
from rlhf_kl.supervised.fit import SupervisedTrainer
from rlhf_kl.supervised.kinds import PairTask, ResponseTask, TextTask
from tests.made import Make, numbers, weights

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
    assert [numbers(note) for note in task.notes] == [[1, 3], [1, 3]]  # cut off; left out
    with pytest.raises(InputError, match="context of 5"):
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


def test_what_the_prompt_opens_is_once_in_front_of_a_response(new_model: Make, letters: Any) -> None:
    """As `<think>` at the end of the prompt; the template leaves thoughts (up to a d) out of answers."""
    chatty = copy.deepcopy(letters)
    chatty.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}b{% endif %}{{ m['content'].split('d')[-1] }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}bcc{% endif %}"
    )
    examples = [Example("a", response) for response in ("ccbda", "cc\nbda", "bda", "a")]
    task = ResponseTask(LM(new_model()), chatty, examples, chat=True)
    prompt, thought = [3, 2, 4, 5, 5], [4, 6, 3, 2]
    assert task.rows[0] == task.rows[2] == [*prompt, *thought]
    assert task.rows[3] == [*prompt, 3, 2]
    assert task.rows[1][-4:] == thought
    assert task.starts == [5] * 4
    [note] = task.notes
    assert numbers(note) == [2, 4]
    assert "'cc'" in note


def test_rows_of_which_the_tokenizer_makes_no_tokens(new_model: Make) -> None:
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *"abcd"])}, []))
    blind = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    lm, other = LM(new_model()), "\u6587"
    task = ResponseTask(lm, blind, [Example(other, "a"), Example("b", "a")])
    assert task.rows == [[4, 3, 2]]
    assert [numbers(note) for note in task.notes] == [[1, 2]]
    with pytest.raises(InputError, match="all 1 rows"):
        ResponseTask(lm, blind, [Example(other, "a")])
    with pytest.raises(InputError, match=r"^data\.texts: .* 2 texts"):
        TextTask(lm, blind, [other, other * 2])


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
    assert [numbers(note) for note in task.notes] == [[2, 3]]
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


def test_equal_scores_cost_log_two(reward: RewardModel) -> None:
    nn.init.zeros_(reward.model.score.weight)
    loss, sums = PairTask(reward, PAIRS).loss([0, 1, 2])
    assert float(loss.detach()) == pytest.approx(3 * math.log(2))
    assert sums == {"train/accuracy": 0.0}


TEXTS = ["abcd" * 3, "abab", "a", "abcd", "dcba" * 2, "b", "abcdabcd", "cc", "abc", "d" * 9]


@pytest.fixture
def make(new_model: Make, letters: Any) -> Make:
    def make(texts: list[str] = TEXTS, seed: int = 0, **settings: Any) -> SupervisedTrainer:
        model = new_model(spread=0.1)
        section = SFTSection.model_validate({"batch_size": 4, "microbatch_size": 2, "learning_rate": 5e-3} | settings)
        return SupervisedTrainer(TextTask(LM(model), letters, texts), section, seed)

    return make


def test_every_row_comes_once_an_epoch(make: Make) -> None:
    trainer = make(epochs=2.0)
    assert trainer.steps == 6  # ten rows in batches of 4, 4 and 2
    for epoch in (0, 3):
        seen = [row for step in range(1, 4) for row in trainer.batch(epoch + step)]
        assert sorted(seen) == list(range(10))
    assert trainer.batch(1) != trainer.batch(4)


def test_the_size_of_a_microbatch_is_no_part_of_the_result(make: Make) -> None:
    found = []
    for size in (1, 2, 4):
        trainer = make(microbatch_size=size)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        start = weights(trainer.model)
        row = trainer.step(1)
        found.append((weights(trainer.model) - start, row["train/loss"]))
    assert float(found[0][0].abs().max()) > 1e-5
    for moved, loss in found[1:]:
        torch.testing.assert_close(moved, found[0][0], rtol=1e-3, atol=1e-6)
        assert loss == pytest.approx(found[0][1], rel=1e-5)


def test_full_memory_names_the_key_of_the_section(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTask, "loss", lambda *_: torch.empty(1 << 60))
    with pytest.raises(MemoryFull, match=r"sft\.microbatch_size"):
        make().step(1)


def test_a_step_goes_down_the_mean_over_tokens(make: Make) -> None:
    trainer = make(max_grad_norm=1e9, warmup=0.0, lr_schedule="constant", learning_rate=1.0)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    rows = trainer.batch(1)
    tokens = sum(len(TEXTS[row]) + 1 for row in rows)  # with the eos
    loss, _ = trainer.task.loss(rows)
    grads = torch.autograd.grad(loss / tokens, list(trainer.model.parameters()))
    start = weights(trainer.model)
    row = trainer.step(1)
    assert row["train/loss"] == pytest.approx(float(loss.detach()) / tokens, rel=1e-5)
    moved = weights(trainer.model) - start
    torch.testing.assert_close(-moved, torch.cat([g.flatten() for g in grads]), rtol=1e-3, atol=1e-6)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_hand_table_of_calibration() -> None:
    """Four predictions at 0.9 of which three are right, four at 0.62 of which two are: 0.15 and 0.12 off."""
    odds = torch.tensor([logit(0.9)] * 4 + [-logit(0.62)] * 4)
    right = torch.tensor([True, True, True, False, True, True, False, False])
    assert calibration_error(odds, right) == pytest.approx(0.5 * 0.15 + 0.5 * 0.12, abs=1e-6)


def test_figures_of_pairs() -> None:
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 3.0, 0.0, -1.0])
    found = pair_figures(chosen, rejected)
    assert found["eval/accuracy"] == 0.5  # a tie is not right
    assert found["eval/margin"] == 0.5
    expected = sum(math.log1p(math.exp(-margin)) for margin in (1, -1, 0, 2)) / 4
    assert found["eval/loss"] == pytest.approx(expected)


def test_figures_of_labels() -> None:
    scores, positive = torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([True, True, False, False])
    found = label_figures(scores, positive)
    assert (found["eval/accuracy"], found["eval/majority"]) == (0.5, 0.5)
    expected = sum(math.log1p(math.exp(wrong)) for wrong in (-2, 1, 0.5, -3)) / 4
    assert found["eval/loss"] == pytest.approx(expected)


def test_a_histogram_counts_everything_once() -> None:
    groups = {"a": torch.linspace(-1, 1, 41), "b": torch.tensor([0.0, 1.0])}
    found = histogram(groups)
    assert (found["edges"][0], found["edges"][-1], len(found["edges"])) == (-1.0, 1.0, 21)
    assert (sum(found["a"]), sum(found["b"])) == (41, 2)
    assert histogram({"a": torch.ones(5)})["edges"][0] < 1.0
