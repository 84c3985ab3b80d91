from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.config.resolve import load_config
from rlhf_kl.data import rows as read
from rlhf_kl.data.chat import Unusable, plain_text, split_conversation
from rlhf_kl.data.rows import Example, Labelled, Pair
from rlhf_kl.errors import InputError
from rlhf_kl.templates import fill, template_fields
from rlhf_kl.training.sets import divided, drawn
from tests.made import numbers, problem

USER, ASSISTANT = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}
SYSTEM = {"role": "system", "content": "be brief"}


def read_texts(rows: Any, column: str, template: str | None, where: str) -> Any:
    return read.read_texts(rows, where, column, template)


def read_prompts(rows: Any, column: str, where: str, *, chat: bool) -> Any:
    return read.read_prompts(rows, where, column=column, chat=chat)


def read_examples(rows: Any, prompt: str | None, response: str, where: str, *, chat: bool = False) -> Any:
    return read.read_examples(rows, where, prompt=prompt, response=response, template=None, chat=chat)


def read_pairs(rows: Any, prompt: str | None, chosen: str, rejected: str, where: str, *, chat: bool = False) -> Any:
    columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return read.read_pairs(rows, where, **columns, template=None, chat=chat)


def read_labels(rows: Any, text: str, label: str, where: str) -> Any:
    return read.read_labels(rows, where, text=text, label=label)


def test_a_template_takes_columns_by_name() -> None:
    assert template_fields("TITLE: {title}\nPOST: {post} {title} {{x}}") == ["title", "post"]
    assert fill("{title}: {n} {{x}}", {"title": "{T}", "n": 3}, "row 1") == "{T}: 3 {x}"


@pytest.mark.parametrize("template", ["plain", "{", "{}", "{0.x}", "{a[b]}", "{a!r}", "{a:>9}", "{{a}}"])
def test_texts_that_are_no_templates(template: str) -> None:
    with pytest.raises(ValueError, match=r"column|brace|\{"):
        template_fields(template)


def test_a_lone_brace_is_a_problem_of_its_key() -> None:
    with pytest.raises(InputError, match=r"^data\.template .*'\{'"):
        load_config("train", "smoke.yaml", ["data.template='{'"])


def test_a_template_that_does_not_fit_its_row() -> None:
    assert "mean title?" in problem(fill, "{titel}", {"title": "T"}, "row 1")
    assert "title is null" in problem(fill, "{title}", {"title": None}, "row 1")
    assert "title is list" in problem(fill, "{title}", {"title": []}, "row 1")


def test_texts_come_from_a_column_or_a_template() -> None:
    rows = [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
    assert read_texts(rows, "a", None, "data.texts") == (["x", "y"], "")
    assert read_texts(rows, "a", "{b}{a}", "data.texts") == (["1x", "2y"], "")


NULLS: list[dict[str, Any]] = [{"a": text} for text in ("x", None, " \n", None, "y")]


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: read_texts(rows, "a", None, "f"),
        lambda rows: read_prompts(rows, "a", "f", chat=False),
        lambda rows: read_labels([row | {"y": 1} for row in rows], "a", "y", "f"),
    ],
)
def test_null_and_empty_rows_are_left_out_counted_and_named(read: Any) -> None:
    items, left_out = read(NULLS)
    assert [getattr(item, "text", item) for item in items] == ["x", "y"]
    assert left_out.startswith("f: ")
    # Of five; null, and in which rows; empty, and in which row.
    assert numbers(left_out) == [3, 5, 2, 2, 4, 1, 3]
    assert numbers(problem(read, NULLS[1:4])) == [3, 2, 1, 3, 1, 2]


def test_null_is_left_out_wherever_a_text_or_a_label_is_read() -> None:
    rows = [{"p": "q", "r": "a", "s": "b"}, {"p": None, "r": "a", "s": "b"}, {"p": "q", "r": None, "s": "b"}]
    for _, left_out in (
        read_texts(rows, "p", "{p}: {r}", "f"),
        read_examples(rows, "p", "r", "f"),
        read_pairs(rows, "p", "s", "r", "f"),
    ):
        assert numbers(left_out) == [2, 3, 2, 2, 3]
    found, left_out = read_labels([{"t": "a", "y": None}, {"t": "b", "y": 0}], "t", "y", "f")
    assert (found, numbers(left_out)) == ([Labelled("b", 0)], [1, 2, 1, 1])


PARTS = [{"type": "text", "text": "why"}, {"type": "text", "text": "?"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_parts_of_text_are_joined_and_what_cannot_be_used_is_named() -> None:
    rows = [
        {"p": [{"role": "user", "content": PARTS}]},
        {"p": [SYSTEM, {"role": "user", "content": PARTS}]},
        {"p": [{"role": "user", "content": [*PARTS, {"type": "image", "image": "x.png"}]}]},
        {"p": [USER, CALL, {"role": "tool", "content": "3"}]},
        {"p": [USER, {"role": "function", "content": "3"}]},
        {"p": [{"role": "user", "content": None}]},
        {"p": [{"role": "user", "content": []}]},
    ]
    items, left_out = read_prompts(rows, "p", "f", chat=True)
    assert items[0] == ("why?", rows[0], (("user", "why?"),))
    assert items[1].messages == (("system", "be brief"), ("user", "why?"))
    assert numbers(left_out) == [5, 7, 3, 3, 4, 6, 1, 5, 1, 7]
    assert ": user, function (row 5)" in left_out


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], ("why?", None)),
        ([USER, ASSISTANT], ("why?", "so.")),
        ([ASSISTANT], (None, "so.")),
        ([USER, USER], ": user, user$"),
        ([SYSTEM], ": system$"),
        ([SYSTEM, ASSISTANT], ": system, assistant$"),
        ([{"role": "tool", "content": "x"}, ASSISTANT], ": tool, assistant$"),
        ([USER, ASSISTANT, USER], ([USER, ASSISTANT, USER], None)),
        ([USER, ASSISTANT, USER, ASSISTANT], ([USER, ASSISTANT, USER], "so.")),
        ([{"role": "developer", "content": "x"}, USER], ([{"role": "developer", "content": "x"}, USER], None)),
        ([SYSTEM, {"role": "developer", "content": "x"}, USER], ": system, developer, user$"),
        ([SYSTEM, USER], ([SYSTEM, USER], None)),
        ([SYSTEM, USER, ASSISTANT], ([SYSTEM, USER], "so.")),
    ],
)
def test_a_conversation_is_split_before_its_last_answer(messages: list[dict[str, Any]], expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(Unusable, match=expected):
            split_conversation(messages)
        return
    prompt, answer = expected
    if isinstance(prompt, list):
        prompt = tuple((turn["role"], turn["content"]) for turn in prompt)
    assert split_conversation(messages) == (prompt, answer)


def test_a_conversation_is_a_text_too() -> None:
    turns = (("user", "why?"), ("assistant", "so."), ("user", "no"))
    assert plain_text(turns) == "user: why?\n\nassistant: so.\n\nuser: no"
    assert plain_text("why?") == "why?"


def test_prompts_of_several_turns_need_a_chat_template() -> None:
    rows = [{"p": "q"}, {"p": [USER, ASSISTANT]}, {"p": [USER, ASSISTANT, USER]}, {"p": [ASSISTANT]}]
    plain, _ = read_prompts(rows, "p", "data.prompts", chat=False)
    assert [row.text for row in plain] == ["q", "why?"]
    items, left_out = read_prompts(rows, "p", "data.prompts", chat=True)
    assert numbers(left_out) == [1, 4, 1, 4]
    assert [len(row.messages) for row in items] == [0, 1, 3]
    none = problem(read_prompts, rows[2:], "p", "data.prompts", chat=False)
    assert "data.chat_template (row 1)" in none
    assert numbers(none) == [2, 1, 1, 1, 2]


def test_examples_of_columns_and_of_conversations() -> None:
    rows = [{"p": "q", "r": "a"}, {"p": "ignored", "r": [USER, ASSISTANT]}, {"p": "x", "r": [USER, ASSISTANT, USER]}]
    found, left_out = read_examples(rows, "p", "r", "data.texts")
    assert found == [Example("q", "a"), Example("why?", "so.")]
    assert numbers(left_out) == [1, 3, 1, 3]
    assert "has no prompt" in problem(read_examples, rows[:1], None, "r", "data.texts")
    assert numbers(problem(read_examples, rows[2:], "p", "r", "data.texts")) == [1, 1, 1]
    several = [{"p": [USER, ASSISTANT, USER], "r": "a"}, {"p": [USER], "r": [ASSISTANT]}]
    items, left_out = read_examples(several, "p", "r", "data.texts", chat=True)
    assert [example.response for example in items] == ["a", "so."]
    assert (len(items[0].prompt), items[1].prompt, left_out) == (3, "why?", "")
    assert read_examples(several, "p", "r", "data.texts")[0] == [Example("why?", "so.")]
    whole = [{"r": [SYSTEM, USER, ASSISTANT]}]
    assert read_examples(whole, None, "r", "data.texts", chat=True)[0][0].response == "so."


def test_pairs_of_columns_conversations_and_whole_texts() -> None:
    columns = [{"prompt": "q", "c": "good", "r": "bad"}, {"prompt": "q", "c": "same", "r": "same"}]
    items, left_out = read_pairs(columns, "prompt", "c", "r", "data.pairs")
    assert (items, numbers(left_out)) == ([Pair("q", "good", "bad")], [1, 2, 1, 2])
    chats = [{"c": [USER, ASSISTANT], "r": [USER, {"role": "assistant", "content": "no."}]}]
    assert read_pairs(chats, None, "c", "r", "data.pairs")[0] == [Pair("why?", "so.", "no.")]
    other = {"role": "user", "content": "how?"}
    longer = [{"c": [USER, ASSISTANT, other, ASSISTANT], "r": [USER, ASSISTANT, other, chats[0]["r"][1]]}]
    items, left_out = read_pairs(longer, None, "c", "r", "data.pairs", chat=True)
    assert items == [Pair((("user", "why?"), ("assistant", "so."), ("user", "how?")), "so.", "no.")]
    assert left_out == ""
    assert "none of 1 rows" in problem(read_pairs, longer, None, "c", "r", "data.pairs")
    unlike = [{"c": [USER, ASSISTANT], "r": [other, ASSISTANT]}]  # answers to different questions are no pair
    assert "none of 1 rows" in problem(read_pairs, unlike, None, "c", "r", "data.pairs", chat=True)
    whole = [{"c": "Human: why? Assistant: so.", "r": "Human: why? Assistant: no."}, {"c": "x", "r": "y"}]
    expected = [Pair("Human: why? Assistant: ", "so.", "no."), Pair("", "x", "y")]
    assert read_pairs(whole, None, "c", "r", "data.pairs")[0] == expected


def test_labels_are_0_and_1() -> None:
    rows = [{"t": "a", "y": 1}, {"t": "b", "y": True}, {"t": "c", "y": "0"}]
    assert read_labels(rows, "t", "y", "data.labels")[0] == [Labelled("a", 1), Labelled("b", 1), Labelled("c", 0)]
    for value in ("positive", 0.5, float("nan"), [1]):
        assert "y is" in problem(read_labels, [{"t": "a", "y": value}], "t", "y", "data.labels")


def test_one_key_in_twenty_is_kept_apart_with_all_its_rows() -> None:
    rows = [(i % 100, i) for i in range(200)]
    train, kept = divided("data.pairs", rows, None, lambda row: row[0])
    assert len({row[0] for row in kept}) == 5
    assert len(kept) == 10
    assert divided("data.pairs", rows, None, lambda row: row[0]) == (train, kept)
    assert sorted(train + kept) == sorted(rows)
    with pytest.raises(InputError, match=r"^data\.pairs: 19 "):
        divided("data.pairs", list(range(19)) * 5, None, lambda row: row)


@pytest.mark.parametrize(("rows", "kept"), [(20, 1), (39, 1), (40, 4), (99, 4), (100, 5), (200, 10)])
def test_two_or_three_rows_whose_error_tells_nothing_are_never_held_out(rows: int, kept: int) -> None:
    assert len(divided("data.texts", range(rows), None, lambda row: row)[1]) == kept


def test_rows_that_are_drawn_come_from_all_of_a_sorted_file() -> None:
    labels = [0] * 500 + [1] * 500
    assert 35 < sum(drawn(labels, 100)) < 65
    rows = list(range(1000))
    some = drawn(rows, 100)
    assert some == sorted(set(some)) == drawn(rows, 100)
    assert drawn(rows, None) == drawn(rows, 1000) == rows
    _, kept = divided("data.texts", labels + rows[2:], None, lambda row: row)
    assert max(kept) - min(kept) > 500


def test_rows_of_held_out_keys_are_left_out() -> None:
    assert divided("data.texts", [1, 2, 3, 2], [2], lambda row: row) == ([1, 3], [2])
    with pytest.raises(InputError, match="every row"):
        divided("data.texts", [2, 2], [2], lambda row: row)
