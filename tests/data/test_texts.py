from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from rlhf_kl.config.load import load_config
from rlhf_kl.data.chat import conversation, several_turns, split_conversation
from rlhf_kl.data.files import split_heldout, without_leaks
from rlhf_kl.data.texts import (
    Example,
    Labelled,
    Pair,
    read_examples,
    read_labels,
    read_pairs,
    read_prompts,
    read_texts,
)
from rlhf_kl.errors import InputError
from rlhf_kl.templates import fill, template_fields

USER, ASSISTANT = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}
SYSTEM = {"role": "system", "content": "be brief"}


def problem(read: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(*arguments, **options)
    assert len(caught.value.problems) == 1
    return str(caught.value)


# ---- templates ----


def test_a_template_takes_columns_by_name() -> None:
    assert template_fields("TITLE: {title}\nPOST: {post} {title} {{x}}") == ["title", "post"]
    assert fill("{title}: {n} {{x}}", {"title": "{T}", "n": 3}, "row 1") == "{T}: 3 {x}"


@pytest.mark.parametrize("template", ["plain", "{", "{}", "{0.x}", "{a[b]}", "{a!r}", "{a:>9}", "{{a}}"])
def test_texts_that_are_no_templates(template: str) -> None:
    with pytest.raises(ValueError, match=r"column|brace|\{"):
        template_fields(template)


def test_a_lone_brace_is_a_problem_of_its_key() -> None:
    with pytest.raises(InputError, match=r"^data\.template is no template: Single '\{'"):
        load_config("train", "smoke.yaml", ["data.template='{'"])


def test_a_template_that_does_not_fit_its_row() -> None:
    assert "no column 'titel'; did you mean title?" in problem(fill, "{titel}", {"title": "T"}, "row 1")
    assert "title is null, not text" in problem(fill, "{title}", {"title": None}, "row 1")
    assert "title is list, not text" in problem(fill, "{title}", {"title": []}, "row 1")


# ---- texts, examples, pairs, labels ----


def test_texts_come_from_a_column_or_a_template() -> None:
    rows = [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
    assert read_texts(rows, "a", None, "data.texts") == ["x", "y"]
    assert read_texts(rows, "a", "{b}{a}", "data.texts") == ["1x", "2y"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], ("why?", None)),
        ([USER, ASSISTANT], ("why?", "so.")),
        ([ASSISTANT], (None, "so.")),
        ([USER, USER], None),
        ([USER, ASSISTANT, ASSISTANT], None),
        ([SYSTEM], None),
        ([SYSTEM, ASSISTANT], None),
        ([USER, SYSTEM], None),
        ([{"role": "tool", "content": "x"}, ASSISTANT], None),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([USER, ASSISTANT, USER], ([USER, ASSISTANT, USER], None)),
        ([USER, ASSISTANT, USER, ASSISTANT], ([USER, ASSISTANT, USER], "so.")),
        ([SYSTEM, USER], ([SYSTEM, USER], None)),
        ([SYSTEM, USER, ASSISTANT], ([SYSTEM, USER], "so.")),
    ],
)
def test_a_conversation_is_split_before_its_last_answer(messages: list[dict[str, Any]], expected: Any) -> None:
    parts = split_conversation(messages)
    if expected is None or not isinstance(expected[0], list):
        assert parts == expected
        assert parts is None or not several_turns(parts[0])
        return
    assert parts is not None
    assert several_turns(parts[0])
    assert parts[0].messages == tuple((turn["role"], turn["content"]) for turn in expected[0])
    assert parts[1] == expected[1]


def test_a_conversation_is_a_text_too() -> None:
    turns = conversation([("user", "why?"), ("assistant", "so."), ("user", "no")])
    assert turns == "user: why?\n\nassistant: so.\n\nuser: no"
    assert len({turns, str(turns)}) == 1
    assert copy.deepcopy(turns).messages == pickle.loads(pickle.dumps(turns)).messages == turns.messages


def test_prompts_of_several_turns_need_a_chat_template() -> None:
    rows = [{"p": "q"}, {"p": [USER, ASSISTANT]}, {"p": [USER, ASSISTANT, USER]}, {"p": [ASSISTANT]}]
    assert read_prompts(rows, "p", None, "data.prompts", chat=False) == (["q", "why?"], 2)
    items, skipped = read_prompts(rows, "p", None, "data.prompts", chat=True)
    assert (len(items), skipped) == (3, 1)
    assert several_turns(items[2])
    assert "none of 2 rows can be used: several turns" in problem(
        read_prompts, rows[2:], "p", None, "data.prompts", chat=False
    )


def test_examples_of_columns_and_of_conversations() -> None:
    rows = [{"p": "q", "r": "a"}, {"p": "ignored", "r": [USER, ASSISTANT]}, {"p": "x", "r": [USER, ASSISTANT, USER]}]
    assert read_examples(rows, "p", "r", None, "data.texts") == ([Example("q", "a"), Example("why?", "so.")], 1)
    assert "has no prompt" in problem(read_examples, rows[:1], None, "r", None, "data.texts")
    assert "none of 1 rows can be used" in problem(read_examples, rows[2:], "p", "r", None, "data.texts")
    several = [
        {"p": [USER, ASSISTANT, USER], "r": "a"},
        {"p": [USER], "r": [ASSISTANT]},
        {"r": [SYSTEM, USER, ASSISTANT]},
    ]
    items, skipped = read_examples(several[:2], "p", "r", None, "data.texts", chat=True)
    assert [example.response for example in items] == ["a", "so."]
    assert (len(items[0].prompt.messages), items[1].prompt, skipped) == (3, "why?", 0)  # type: ignore[attr-defined]
    assert read_examples(several[:2], "p", "r", None, "data.texts") == ([Example("why?", "so.")], 1)
    assert read_examples(several[2:], None, "r", None, "data.texts", chat=True)[0][0].response == "so."


def test_pairs_of_columns_conversations_and_whole_texts() -> None:
    columns = [{"prompt": "q", "c": "good", "r": "bad"}, {"prompt": "q", "c": "same", "r": "same"}]
    assert read_pairs(columns, "prompt", "c", "r", None, "data.pairs") == ([Pair("q", "good", "bad")], 1)
    chats = [{"c": [USER, ASSISTANT], "r": [USER, {"role": "assistant", "content": "no."}]}]
    assert read_pairs(chats, None, "c", "r", None, "data.pairs")[0] == [Pair("why?", "so.", "no.")]
    other = {"role": "user", "content": "how?"}
    longer = [{"c": [USER, ASSISTANT, other, ASSISTANT], "r": [USER, ASSISTANT, other, chats[0]["r"][1]]}]
    items, skipped = read_pairs(longer, None, "c", "r", None, "data.pairs", chat=True)
    assert items == [Pair(conversation([("user", "why?"), ("assistant", "so."), ("user", "how?")]), "so.", "no.")]
    assert skipped == 0
    assert "none of 1 rows" in problem(read_pairs, longer, None, "c", "r", None, "data.pairs")
    unlike = [{"c": [USER, ASSISTANT], "r": [other, ASSISTANT]}]  # answers to different questions are no pair
    assert "none of 1 rows" in problem(read_pairs, unlike, None, "c", "r", None, "data.pairs", chat=True)
    whole = [{"c": "Human: why? Assistant: so.", "r": "Human: why? Assistant: no."}, {"c": "x", "r": "y"}]
    assert read_pairs(whole, None, "c", "r", None, "data.pairs")[0] == [
        Pair("Human: why? Assistant: ", "so.", "no."),
        Pair("", "x", "y"),
    ]


def test_labels_are_0_and_1() -> None:
    rows = [{"t": "a", "y": 1}, {"t": "b", "y": True}, {"t": "c", "y": "0"}]
    assert read_labels(rows, "t", "y", "data.labels") == [Labelled("a", 1), Labelled("b", 1), Labelled("c", 0)]
    for value in ("positive", None, 0.5, float("nan"), [1]):
        assert "y is" in problem(read_labels, [{"t": "a", "y": value}], "t", "y", "data.labels")


# ---- held-out parts ----


def test_every_twentieth_key_is_kept_apart_with_all_its_rows() -> None:
    rows = [(i % 60, i) for i in range(120)]
    train, kept = split_heldout(rows, lambda row: row[0])
    assert {row[0] for row in kept} == {19, 39, 59}
    assert len(kept) == 6
    assert sorted(train + kept) == sorted(rows)
    with pytest.raises(InputError, match="19 different rows are too few"):
        split_heldout(list(range(19)) * 5, lambda row: row)


def test_rows_of_held_out_keys_are_left_out() -> None:
    assert without_leaks([1, 2, 3, 2], [2], lambda row: row) == [1, 3]
    with pytest.raises(InputError, match="every row"):
        without_leaks([2, 2], [2], lambda row: row)
