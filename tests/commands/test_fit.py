from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.commands.fit import dtype_finding, frequency_perplexity, perplexity_finding, rate_finding
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.lora import add_adapter

Cli = Callable[..., Any]


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate(sections)


class Sized(torch.nn.Module):
    """A policy of so many parameters; only their number counts here."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(int(parameters), device="meta"))


@pytest.mark.parametrize(
    ("parameters", "rate", "level"),
    [
        (890_208, 2e-4, "fine"),  # the built-in run
        (656e3, 5e-4, "fine"),  # was tried
        (124e6, 2e-4, "doubtful"),  # the built-in run's on GPT-2
        (124e6, 1.41e-5, "fine"),
        (1e9, 3e-6, "fine"),
        (7e9, 5e-7, "fine"),
        (7e9, 1e-5, "doubtful"),  # an adapter's
        (7e9, 1e-8, "doubtful"),
    ],
)
def test_a_rate_that_does_not_fit_the_size(parameters: float, rate: float, level: str) -> None:
    found = rate_finding(config(ppo={"learning_rate": rate}), Sized(parameters))
    assert found.level == level, found
    if level == "doubtful":
        better = re.match(r"ppo\.learning_rate=(\S+), or auto$", found.change)
        assert better
        again = rate_finding(config(ppo={"learning_rate": float(better[1])}), Sized(parameters))
        assert again.level == "fine"
    assert rate_finding(config(), Sized(parameters)).level == "fine"


def test_an_adapter_is_judged_by_rates_of_adapters(new_model: Callable[..., Any]) -> None:
    adapted = add_adapter(new_model(), r=1, alpha=1.0, target_modules=None, ref="x", what="policy.lora", seed=0)
    assert rate_finding(config(ppo={"learning_rate": 5e-3}), adapted).level == "fine"
    assert rate_finding(config(ppo={"learning_rate": 5e-3}), new_model()).level == "doubtful"
    low = rate_finding(config(ppo={"learning_rate": 5e-4}), adapted)
    assert low.level == "doubtful"
    assert "an adapter" in low.text


def test_what_the_frequencies_of_tokens_alone_give() -> None:
    assert frequency_perplexity([[3, 4], [5, 6]]) == pytest.approx(4)  # four tokens, each as often
    assert frequency_perplexity([[3, 3, 3]]) == 1
    # Shares 2/3 and 1/3: exp(ln 3 - 2/3 ln 2) = 3 / 2^(2/3).
    assert frequency_perplexity([[3, 3], [4]]) == pytest.approx(3 / 2 ** (2 / 3))
    assert frequency_perplexity([]) == 1


def test_texts_that_the_policy_does_not_write(letters: Any) -> None:
    texts = ["abcd", "dcba"]
    assert perplexity_finding(3.9, texts, letters).level == "fine"
    found = perplexity_finding(4.1, texts, letters)
    assert found.level == "doubtful"
    assert "4.10 on 2 texts" in found.text
    assert "eval.texts" in found.change


def test_a_random_model_is_no_better_than_frequencies(
    rlhf_kl: Cli, tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    outcome = rlhf_kl("doctor", "--config", tmp_path / "tiny.yaml", "--json", "--quiet")
    (found,) = [finding for finding in json.loads(outcome.out) if finding["topic"] == "eval"]
    assert found["level"] == "doubtful"
    assert "frequencies alone (4)" in found["text"]  # as many letters, each as often


def test_bfloat16_on_a_cpu_is_measured(new_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, halves = TransformersLM(new_model()), config(run={"dtype": "bfloat16"})
    found = dtype_finding(halves, lm)
    share = re.search(r"take (\S+) times as long", found.text)
    assert share
    assert 0.05 < float(share[1]) < 20
    for half, level in ((0.64, "fine"), (1.3, "doubtful")):
        seconds = {"bfloat16": half, "float32": 1.0}
        monkeypatch.setattr("rlhf_kl.commands.fit.seconds_of_pass", lambda _lm, dtype, times=seconds: times[dtype])
        found = dtype_finding(halves, lm)
        assert (found.level, bool(found.change)) == (level, level == "doubtful")
        assert f"take {half} times as long" in found.text
    assert dtype_finding(config(), lm).level == "fine"
