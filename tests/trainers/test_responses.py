from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_kl.data.chat import Conversation
from rlhf_kl.data.texts import Example
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.trainers.tasks import ResponseTask

Make = Callable[..., Any]
EXAMPLES = [Example("ab", "cd"), Example("d", "abc"), Example("cc", "")]


def test_only_the_response_and_its_eos_are_learned(new_model: Make, letters: Any) -> None:
    """transformers computes the same where the prompt's labels are -100."""
    model = new_model()
    task = ResponseTask(LM(model), letters, EXAMPLES)
    assert task.rows == [[1, 3, 4, 5, 6, 2], [1, 6, 3, 4, 5, 2], [1, 5, 5, 2]]
    assert [task.weight(i) for i in range(3)] == [3.0, 4.0, 1.0]
    for i, row in enumerate(task.rows):
        learned = int(task.weight(i))
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


def test_of_several_turns_the_last_answer_is_learned(new_model: Make, letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    said = Conversation([("user", "a"), ("assistant", "b"), ("user", "c")])
    task = ResponseTask(LM(new_model()), chatty, [Example(said, "d")], chat=True)
    assert task.rows == [[3, 2, 4, 2, 5, 2, 6, 2]]
    assert task.starts == [6]


def test_the_prompts_tokens_are_those_of_a_rollout() -> None:
    """Where prompt and response would melt into one token they are kept apart."""
    from rlhf_kl.models.scratch import new_gpt2, train_tokenizer
    from rlhf_kl.models.text import encode

    tokenizer = train_tokenizer(["abab abab"] * 50, 270, 32)
    assert len(encode(tokenizer, "abab", bos=False)) < 4  # "ab" is one token
    model = new_gpt2(
        vocab_size=len(tokenizer), hidden_size=8, layers=1, heads=1, context=32, tokenizer=tokenizer, seed=0
    )
    task = ResponseTask(LM(model), tokenizer, [Example("a", "b")])
    assert task.rows[0][: task.starts[0]] == encode(tokenizer, "a")
    assert tokenizer.decode(task.rows[0][task.starts[0] : -1]) == "b"
