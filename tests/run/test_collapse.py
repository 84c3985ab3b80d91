"""Responses that became one text, by rows."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.run.collapse import IN_A_ROW, EqualResponses

HEALTHY = {"rollout/distinct_responses": 1.0, "objective/scores_std": 0.7, "objective/scores": 1.0}
COLLAPSED = {"rollout/distinct_responses": 0.016, "objective/scores_std": 0.0, "objective/scores": -11.0}
FLAT = {"rollout/distinct_responses": 0.9, "objective/scores_std": 1e-9, "objective/scores": 0.1}


def told(*rows: dict[str, Any]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(update, text) of the alerts and of the plain lines."""
    equal = EqualResponses()
    said = [(step, *equal({"step": step, **row})) for step, row in enumerate(rows, 1)]
    return [(step, text) for step, texts, _ in said for text in texts], [
        (step, text) for step, _, texts in said for text in texts
    ]


@pytest.mark.parametrize("gold", [{}, {"objective/gold": 0.5}])
def test_a_collapse_is_told_once_with_and_without_a_true_score(gold: dict[str, Any]) -> None:
    [(step, alert)], lines = told(*[HEALTHY] * 10, *[COLLAPSED | gold] * 40)
    assert step == 10 + IN_A_ROW
    assert alert.startswith("responses-equal: ")
    for words in ("2% different texts", "samples.jsonl", "optimum", "kl.target", "prompts that end"):
        assert words in alert
    assert lines == []  # the alert has said it


def test_few_updates_are_no_collapse() -> None:
    assert told(*[*[COLLAPSED] * (IN_A_ROW - 1), HEALTHY] * 5) == ([], [])


def test_it_can_come_again_only_after_it_has_cleared() -> None:
    hovering = [*[COLLAPSED] * IN_A_ROW, COLLAPSED | {"rollout/distinct_responses": 0.3}] * 3
    assert len(told(*hovering)[0]) == 1
    assert len(told(*[COLLAPSED] * IN_A_ROW, *[HEALTHY], *[COLLAPSED] * IN_A_ROW)[0]) == 2


def test_equal_scores_of_different_texts_are_one_plain_line() -> None:
    alerts, [(step, line)] = told(*[HEALTHY] * 3, *[FLAT] * 10, HEALTHY, *[FLAT] * 10)
    assert alerts == []
    assert step == 3 + IN_A_ROW
    assert "the same score (0.1)" in line
    assert told(*[FLAT | {"objective/scores_std": 1e-3}] * 20) == ([], [])


def test_rows_without_the_figures_say_nothing() -> None:
    assert told(*[{}, {"objective/scores_std": 0.0}, COLLAPSED | {"rollout/distinct_responses": None}] * 5) == ([], [])
