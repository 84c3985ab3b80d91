from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rlhf_kl.report.texts import across, answers, held_out_texts, titled_answers
from tests.runs import Write


def rows(prompt: str, *responses: str) -> list[dict[str, Any]]:
    """The reference's response, which is the policy's first, and those that follow every ten updates."""
    made: list[dict[str, Any]] = [
        {"step": 1 + 10 * i, "prompt": prompt, "response": response, "chosen": "held out", "score": i, "kl": 1.5 * i}
        for i, response in enumerate(responses)
    ]
    made[0]["reference"] = {"response": responses[0], "score": None, "gold": None}
    return made


@pytest.fixture
def folder(write_run: Write) -> Write:
    trained = {"step": 1, "prompt": "p", "response": "trained on", "chosen": "first", "score": 0.0, "tokens": []}
    return lambda name, *prompts: write_run(name, [], [trained, *(row for each in prompts for row in each)])


def test_before_on_the_way_and_after(folder: Write) -> None:
    one, other = held_out_texts(folder("run", rows("p", "a", "b", "c"), rows("q", "d", "e")))
    assert (one["prompt"], one["reference"]["text"]) == ("p", "a")
    found = [(text["step"], text["text"], text["kl"]) for text in one["policy"]]
    assert found == [(1, "a", 0), (11, "b", 1.5), (21, "c", 3)]
    assert [text["text"] for text in other["policy"]] == ["d", "e"]
    assert held_out_texts(folder("new")) == []


def shown(texts: list[dict[str, Any]]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(titled_answers(texts))
    return console.export_text()


def test_prompts_that_are_not_held_out_are_not_called_so(folder: Write) -> None:
    own = [row | {"chosen": "training prompt"} for row in rows("p", "a", "b")]
    (found,) = held_out_texts(folder("few", own))
    assert found["trained_on"]
    assert "too few to hold some out" in shown([found])
    (other,) = held_out_texts(folder("many", rows("p", "a", "b")))
    assert not other["trained_on"]
    assert "Held-out prompts, answered" in shown([other])


def test_a_prompt_that_all_runs_have(folder: Write) -> None:
    one, other = folder("one", rows("o", "x"), rows("p", "a", "b")), folder("other", rows("p", "a", "c"))
    found = across({"low": one, "high": other})
    assert found is not None
    assert (found["prompt"], found["reference"]["text"]) == ("p", "a")
    assert {name: text["text"] for name, text in found["policies"].items()} == {"low": "b", "high": "c"}
    assert across({"low": one, "new": folder("new")}) is None


@pytest.mark.parametrize(("width", "beside"), [(80, True), (50, False)])
def test_two_texts_stand_beside_each_other_where_there_is_room(folder: Write, width: int, beside: bool) -> None:
    texts = held_out_texts(folder("run", rows("p", "before " * 20, "\x1b[2Jafter " * 20)))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(answers(texts))
    lines = console.export_text().splitlines()
    assert any("before" in line and "after" in line for line in lines) is beside
    assert "\x1b[2J" not in "".join(lines)
    assert any("score 1.0, KL 1.5" in line for line in lines)
    assert all(len(line.rstrip()) <= width for line in lines)
    assert max(len(line.rstrip()) for line in lines) > width - 8  # a narrow terminal's room is used


def test_tokens_are_coloured_by_their_kl_as_far_as_they_are_the_text() -> None:
    tokens = [{"text": " cold", "kl": 0.1}, {"text": " s", "kl": 9.0}, {"text": "\ufffd", "kl": 9.0}]
    text = {"text": " cold soup", "tokens": tokens, "ended": False, "score": 1.0, "score_mean": 0.75, "of": 8}
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(answers([{"prompt": "p", "policy": [text]}]))
    plain = console.export_text(clear=False)
    assert [line.rstrip() for line in plain.splitlines()] == [
        "p",
        "policy  score 1.0 (median of 8, mean 0.75), not ended",
        "cold soup",
    ]
    assert "\x1b[33mcold\x1b[0m\x1b[31m s\x1b[0moup" in console.export_text(styles=True)
