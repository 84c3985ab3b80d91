from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.commands.findings import check_perplexity, check_rate, check_samples, check_target, stored_bytes
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import can_shard
from rlhf_kl.ppo.reference import ReferenceScores

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
    fine = {"dtype", "rate", "context", "memory", "start", "target", "beta", "samples", "EOS", "time"}
    assert found.keys() == fine | untrained
    levels = {topic: {level for level, _ in lines} for topic, lines in found.items() if topic in fine}
    assert levels == {topic: {"fine"} for topic in fine}
    assert "longest prompt 4 tokens and 6 new ones fit into 32" in found["context"][0][1]
    assert "6 updates" in found["time"][0][1]
    assert "all responses of full length, measured; " in found["memory"][0][1]
    ((_, text),) = found["eval"]
    assert "frequencies alone give 4" in text  # as many letters, each as often
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}  # nothing is left behind


def test_a_controller_that_cannot_move_and_a_gradient_that_is_none(doctor: Doctor) -> None:
    found = doctor("kl.controller={kind: ziegler, coef: 0.1, horizon: 1000000}", "kl.placement=loss")["beta"]
    assert {level for level, _ in found} == {"doubtful"}
    for words in ("controller-too-slow", "expected gradient is zero"):
        assert any(words in text for _, text in found)


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
            "the reward model is right on 50% of 16 held-out pairs; "
            "train it on more pairs, or use another reward.model",
        )
    ]


@pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
def test_the_doctor_counts_for_several_processes(doctor: Doctor) -> None:
    ((level, text),) = doctor("policy.shard=true", processes=2)["memory"]
    assert level == "fine"
    assert "of weights, gradients and moments in each of 2 processes, computed" in text


@pytest.mark.parametrize(
    ("changes", "processes", "bytes_of_a_number"),
    [
        ([], 1, 24.0),  # the policy, and its reference in float32
        ([], 4, 24.0),
        (["policy.shard=true"], 4, 20 / 4 + 4),
        (["policy.shard=true", "reference.shard=true"], 4, 24 / 4),
        (["policy.value=separate"], 1, 44.0),
    ],
)
def test_what_each_process_stores(new_model: Any, changes: list[str], processes: int, bytes_of_a_number: float) -> None:
    lm = SimpleNamespace(module=(model := new_model()))
    frozen = SimpleNamespace(module=copy.deepcopy(model).requires_grad_(False))
    config = load_config("train", "smoke.yaml", changes)
    setup: Any = SimpleNamespace(policy=lm, reference=frozen, scorers=SimpleNamespace(models={}))
    expected = bytes_of_a_number * sum(p.numel() for p in model.parameters())
    assert stored_bytes(config, setup, processes) == pytest.approx(expected, abs=4)


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


# ---- the score that a KL allows


NORMAL = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]


@pytest.mark.parametrize(("unit", "target"), [("token", 0.05), ("sequence", 1.0)])
def test_the_most_score_at_the_target_by_the_gaussian_law(unit: str, target: float) -> None:
    """A gain of sd sqrt(2 KL of the sequence): sequences have 20 tokens, so both targets are 1 nat of it."""
    kl = {"unit": unit, "target": target}
    [found] = check_target(config(kl=kl), ReferenceScores([5.0 + 3.0 * x for x in NORMAL], [0] * 4096, 20.0))
    words = re.search(r"score from (\S+) to (\S+) at most", found.text)
    assert words
    assert float(words[1]) == pytest.approx(5.0, abs=0.01)
    assert float(words[2]) == pytest.approx(5.0 + 3.0 * math.sqrt(2), rel=0.01)


def test_equal_scores_tell_nothing_of_the_target() -> None:
    assert not list(check_target(config(), ReferenceScores([1.0] * 64, [i // 8 for i in range(64)], 20.0)))


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
