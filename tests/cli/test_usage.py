"""Usage errors and interruptions: one line, with what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl import cli
from rlhf_kl.errors import Interrupted

Cli = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("train", "such as rlhf-kl train --config smoke.yaml (see rlhf-kl train --help)"),
        ("train --lr 1", "config keys are changed with --set: --set ppo.learning_rate=VALUE"),
        ("train --beta 1", "--set kl.controller.coef=VALUE"),
        ("sft --batch-size 1", "--set sft.batch_size=VALUE"),
        ("compare --learning-rate 1", "--set ppo.learning_rate=VALUE"),
        ("train --zzzz", "--set KEY=VALUE"),
        ("eval --rnu x", "see rlhf-kl eval --help"),
        ("tarin", "see rlhf-kl --help"),
    ],
)
def test_advice_after_a_usage_error(words: str, advice: str, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl(*words.split())
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert advice in outcome.err


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("train --config a.yaml --overwrite", "rlhf-kl train --config a.yaml --resume"),
        ("sft --config a.yaml --resume", "rlhf-kl sft --config a.yaml --resume"),
        ("compare --config a.yaml", "rlhf-kl compare --config a.yaml"),
    ],
)
def test_an_interrupted_command_names_the_one_that_goes_on(
    words: str, again: str, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: list[str]) -> int:
        raise Interrupted(2)

    monkeypatch.setattr(cli, "_command", stop)
    outcome = rlhf_kl(*words.split())
    assert outcome.code == 130
    assert outcome.err == f"interrupted; to go on from the last checkpoint: {again}\n"
