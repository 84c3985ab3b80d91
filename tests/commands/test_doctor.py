from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.commands.doctor import check_perplexity, check_rate, check_samples
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import can_shard

Cli = Callable[..., Any]
Doctor = Callable[..., dict[str, list[tuple[str, str]]]]


@pytest.fixture
def doctor(rlhf_kl: Cli, tmp_path: Path, tiny_settings: dict[str, Any]) -> Doctor:
    """`doctor("kl.target=0.2", code=0)`: topic -> its (level, text), of the tiny run with these changes."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))

    def check(
        *changes: str, code: int = 0, pairs: Path | None = None, processes: int = 1
    ) -> dict[str, list[tuple[str, str]]]:
        sets = [argument for change in changes for argument in ("--set", change)]
        more: tuple[Any, ...] = ("--pairs", pairs) if pairs else ()
        more += ("--processes", processes) if processes > 1 else ()
        outcome = rlhf_kl("doctor", "--config", tmp_path / "tiny.yaml", "--json", "--quiet", *sets, *more)
        assert outcome.code == code, outcome
        found: dict[str, list[tuple[str, str]]] = {}
        for finding in json.loads(outcome.out):
            found.setdefault(finding["topic"], []).append((finding["level"], f"{finding['text']}; {finding['change']}"))
        return found

    return check


def test_a_healthy_run_is_fine(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor()
    untrained = {"scores", "eval"}  # doubtful of a random model and a reward that counts a letter
    fine = {"dtype", "rate", "context", "memory", "start", "beta", "samples", "EOS", "time"}
    assert found.keys() == fine | untrained
    levels = {topic: {level for level, _ in lines} for topic, lines in found.items() if topic in fine}
    assert levels == {topic: {"fine"} for topic in fine}
    assert "longest prompt 4 tokens and 6 new ones fit into 32" in found["context"][0][1]
    assert "6 updates" in found["time"][0][1]
    ((_, text),) = found["eval"]
    assert "frequencies alone (4)" in text  # as many letters, each as often
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}  # nothing is left behind


def test_a_controller_that_cannot_move_and_a_gradient_that_is_none(doctor: Doctor) -> None:
    slow = doctor("kl.controller={kind: ziegler, coef: 0.1, horizon: 1000000}")["beta"]
    assert [level for level, _ in slow] == ["doubtful"]
    assert "controller-too-slow" in slow[0][1]
    loss = doctor("kl.placement=loss")["beta"]
    assert any("expected gradient is zero" in text for _, text in loss)


def test_a_score_of_few_values_and_one_that_is_constant(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def coarse(prompts, responses):\n    return [float('a' in response) for response in responses]\n"
        "def constant(prompts, responses):\n    return [1.0 for _ in responses]\n"
    )
    ((level, text),) = doctor(f"reward={{kind: '{tmp_path}/own.py:coarse', missing_eos_penalty: 0}}")["scores"]
    assert level == "doubtful"
    assert "only 2 different values" in text
    found = doctor(f"reward={{kind: '{tmp_path}/own.py:constant'}}", code=2)
    assert found["config"][0][0] == "fatal"
    assert "finds no scale" in found["config"][0][1]


def test_a_reference_with_other_tokens_is_fatal(doctor: Doctor, tiny_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = 4, 3
    path.write_text(json.dumps(tokenizer))
    found = doctor(f"reference.model='{copy}'", code=2)
    assert ("fatal", "policy and reference tokenize prompts differently; reference.model") in found["tokenizer"]


def test_a_reward_model_is_tried_on_pairs(doctor: Doctor, tiny_reward_folder: Path, tmp_path: Path) -> None:
    reward = f"reward={{kind: model, model: '{tiny_reward_folder}'}}"
    assert doctor(reward)["reward"] == [
        ("doubtful", "the accuracy of the reward model is unknown; measure it: doctor --pairs FILE")
    ]
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in range(1, 9)]
    rows += [{"prompt": "a", "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert doctor(reward, pairs=tmp_path / "p.jsonl")["reward"] == [
        (
            "doubtful",
            "the reward model is right on 50% of 16 held-out pairs, and guessing on 50%; "
            "train it on more pairs, or use another reward.model",
        )
    ]


@pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
def test_the_doctor_counts_for_several_processes(doctor: Doctor) -> None:
    one = doctor()["memory"]
    two = doctor("policy.shard=true", processes=2)["memory"]
    assert "all responses of full length, measured; " in one[0][1]
    assert re.match(r"in each of 2 processes .* of full length, counted; ", two[0][1])
    assert one[0][0] == two[0][0] == "fine"


@pytest.mark.parametrize(
    ("responses", "level", "words"),
    [
        (["once", "twice", "thrice", "never"], "fine", "'the end of a' -> 'once'; 'b' -> 'twice'"),
        (["", " ", "", "once"], "doubtful", "75% of 4 responses are empty"),
        (["<end>", "once", "<end>", "<end>"], "doubtful", "75% of 4 responses are the same text, '<end>'"),
        (["yes", "no", "yes", "no"], "fine", "'yes'"),
    ],
)
def test_two_samples_of_the_start_and_a_doubt(responses: list[str], level: str, words: str) -> None:
    found = check_samples(["the end of a", "b", "c", "d"], responses)
    assert found.level == level
    assert words in found.text
    assert bool(found.change) == (level == "doubtful")


# ---- learning rate, texts and number type


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
        (124e6, 2e-4, "doubtful"),  # the built-in run's on GPT-2
        (124e6, 1.41e-5, "fine"),
        (7e9, 1e-5, "doubtful"),  # an adapter's
        (7e9, 1e-8, "doubtful"),
    ],
)
def test_a_rate_that_does_not_fit_the_size(parameters: float, rate: float, level: str) -> None:
    found = check_rate(config(ppo={"learning_rate": rate}), Sized(parameters))
    assert found.level == level, found
    if level == "doubtful":
        better = re.match(r"ppo\.learning_rate=(\S+), or auto$", found.change)
        assert better
        again = check_rate(config(ppo={"learning_rate": float(better[1])}), Sized(parameters))
        assert again.level == "fine"
    assert check_rate(config(), Sized(parameters)).level == "fine"


def test_texts_that_the_policy_does_not_write(letters: Any) -> None:
    texts = ["abcd", "dcba"]
    assert check_perplexity(3.9, texts, letters).level == "fine"
    found = check_perplexity(4.1, texts, letters)
    assert found.level == "doubtful"
    assert "4.10 on 2 texts" in found.text
    assert "eval.texts" in found.change
