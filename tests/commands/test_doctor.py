from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.commands import findings
from rlhf_kl.commands.findings import (
    check_endings,
    check_rate,
    check_samples,
    check_targets,
    largest_update,
    run_time,
)
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.models.lm import LM
from rlhf_kl.monitors.readiness import judge
from rlhf_kl.ppo.reference import ReferenceScores, reference_responses
from rlhf_kl.sharding import can_shard
from rlhf_kl.types import Sampling
from tests.made import Make, numbers, rollout
from tests.runs import Cli, jsonl, rows, sets

Doctor = Callable[..., dict[str, list[tuple[str, str]]]]


@pytest.fixture
def doctor(rlhf_kl: Cli, tmp_path: Path, tiny_settings: dict[str, Any]) -> Doctor:
    """`doctor("kl.target=0.2", code=0)`: topic -> its (level, text), of the tiny run with these changes."""
    run = tiny_settings["run"] | {"output_dir": str(tmp_path / "run")}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings | {"run": run}))

    def check(*changes: str, code: int = 0, options: Sequence[str] = ()) -> dict[str, list[tuple[str, str]]]:
        words = ("doctor", "--config", tmp_path / "tiny.yaml", "--json", "--quiet", *sets(*changes), *options)
        outcome = rlhf_kl(*words)
        assert outcome.code == code, outcome
        found: dict[str, list[tuple[str, str]]] = {}
        for finding in json.loads(outcome.out):
            found.setdefault(finding["topic"], []).append((finding["level"], f"{finding['text']}; {finding['change']}"))
        return found

    return check


def test_plain_prompts_beside_a_chat_template_are_doubtful(doctor: Doctor, tmp_path: Path, tiny_folder: Path) -> None:
    chat = shutil.copytree(tiny_folder, tmp_path / "chat")
    file = chat / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    [(level, text)] = doctor(f"policy.model='{chat}'")["prompts"]
    assert level == "doubtful"
    assert "data.chat_template=true" in text
    assert "prompts" not in doctor(f"policy.model='{chat}'", "data.chat_template=false")


def test_what_each_reward_model_reads_is_shown(
    doctor: Doctor, tmp_path: Path, tiny_folder: Path, tiny_reward_folder: Path
) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for name, source, limit in (("policy", tiny_folder, 32), ("chat", tiny_reward_folder, 32), ("short", "chat", 7)):
        file = shutil.copytree(tmp_path / source, tmp_path / name) / "tokenizer_config.json"
        changed = {"chat_template": template, "model_max_length": limit}
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    terms = {
        "a": {"model": str(tiny_reward_folder)},
        "b": {"model": str(tmp_path / "chat"), "chat_template": True},
    }
    found = doctor(
        f"reward={{kind: sum, normalize: true, terms: {json.dumps(terms)}}}",
        f"eval.scorers.c={{model: '{tmp_path / 'short'}'}}",
        f"policy.model='{tmp_path / 'policy'}'",
        "data={chat_template: true, system: dab}",
    )
    shown = {text.partition(" ")[0]: (level, text) for level, text in found["reads"]}
    levels = {"reward.terms.a.model": "fine", "reward.terms.b.model": "fine", "eval.scorers.c.model": "doubtful"}
    assert {key: level for key, (level, _) in shown.items()} == levels
    assert "eval.scorers.c.chat_template=true" in shown["eval.scorers.c.model"][1]
    assert "<eos>'" in shown["reward.terms.a.model"][1]
    assert " 'dab" in shown["reward.terms.b.model"][1]  # as the policy reads it
    beyond = {text.partition(" ")[0]: numbers(text)[0] for level, text in found["context"] if level == "doubtful"}
    assert beyond == {"eval.scorers.c.model": 7}


@pytest.mark.parametrize(
    ("final", "level", "chance"),
    [
        ({"eval/accuracy": 0.63, "eval/majority": 0.58}, "doubtful", "58%"),  # of labels: the more frequent one
        ({"eval/accuracy": 0.7, "eval/majority": 0.58}, "fine", "58%"),
        ({"eval/accuracy": 0.63}, "fine", "50%"),  # of pairs
    ],
)
def test_a_reward_model_is_compared_with_guessing(
    tmp_path: Path, final: dict[str, float], level: str, chance: str
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"final": final}))
    config = TrainConfig.model_validate({"reward": {"model": str(tmp_path / "final")}})
    setup: Any = SimpleNamespace(scorers=SimpleNamespace(model=object()))
    [found] = findings.check_reward_model(config, setup, None)
    assert found.level == level
    assert f"guessing on {chance}" in found.text


def test_a_healthy_run_is_fine(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor()
    untrained = {"scores"}  # doubtful of a random model and a reward that counts a letter
    fine = {
        "dtype",
        "rate",
        "context",
        "memory",
        "start",
        "targets",
        "beta",
        "samples",
        "EOS",
        "time",
        "eval",
        "checkpoint",
    }
    assert found.keys() == fine | untrained
    levels = {topic: {level for level, _ in lines} for topic, lines in found.items() if topic in fine}
    assert levels == {topic: {"fine"} for topic in fine}
    assert numbers(found["context"][0][1]) == [4, 6, 32]  # the longest prompt, new tokens, the context
    assert "6 updates of" in found["time"][0][1]
    assert "in all; `train --updates N` makes N" in found["time"][0][1]
    assert re.match(r"a checkpoint every 2 updates \(1 MB, .*\); 12 of them take 1 MB, of ", found["checkpoint"][0][1])
    assert "100% of the most tokens possible, measured; " in found["memory"][0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]  # it leaves nothing for a run to find


def test_the_time_of_a_long_run_stands_beside_that_of_a_shorter_one() -> None:
    """By hand: 60 * 143 + 7 * 30 + 19 seconds; 20 * 143 + 3 * 30 + 19."""
    assert re.match(r"about 2:26:49 .*`train --updates 20`: about 49:29$", run_time(60, 10, 19.0, 143.0, 30.0))
    assert run_time(20, 10, 19.0, 143.0, 30.0).startswith("about 49:29 ")


def test_a_reward_that_fails_is_told_before_the_reference_is_sampled(
    doctor: Doctor, rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text("def broken(prompts, responses):\n    return [len(r) / 0 for r in responses]\n")
    monkeypatch.setattr("rlhf_kl.training.start.sample_references", lambda *_: pytest.fail("sampled many responses"))
    change = f"reward.kind={tmp_path / 'bad.py'}:broken"
    (finding,) = doctor(change, code=2)["config"]
    assert "reward: raised ZeroDivisionError" in finding[1]
    done = rlhf_kl("train", "--config", tmp_path / "tiny.yaml", "--quiet", *sets(change))
    assert done.code == 2
    assert "reward: raised ZeroDivisionError" in done.err


COUNTS = '''
import random, torch
class Counts:
    """Its score depends on how often it was called, and on the library's random numbers."""
    calls = 0
    def __call__(self, prompts, responses):
        self.calls += 1
        return [self.calls + random.random() + float(torch.rand(())) + text.count("a") for text in responses]
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]
'''


def test_to_try_the_reward_changes_nothing(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    changes = (f"reward.kind={tmp_path / 'counts.py'}:Counts", "ppo.total_episodes=32", "eval.every=1")
    train(tmp_path / "tried", *changes)
    monkeypatch.setattr("rlhf_kl.training.start.try_reward", lambda *_: None)
    train(tmp_path / "not", *changes)
    scores = [[row["objective/scores"] for row in rows(tmp_path / name)[:2]] for name in ("tried", "not")]
    assert scores[0] == scores[1]


def test_a_disk_without_room_and_a_folder_that_cannot_be_written(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100))
        ((level, text),) = doctor()["checkpoint"]
    assert (level, "checkpoint.keep=1" in text) == ("doubtful", True)
    real = os.access
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "run" and real(place, mode))
    assert doctor(code=2)["checkpoint"][0][1].startswith(f"{tmp_path / 'run'} cannot be written; ")


@pytest.mark.parametrize(
    ("rate", "penalty", "level", "words"),
    [(0.03, 1.0, "doubtful", "the others lose 1 "), (0.3, 1.0, "fine", "lose 1 "), (0.0, 0.0, "fine", "costs nothing")],
)
def test_endings_are_doubted_where_they_cost(rate: float, penalty: float, level: str, words: str) -> None:
    config = TrainConfig.model_validate({"reward": {"missing_eos_penalty": penalty}})
    setup: Any = SimpleNamespace(sampling=Sampling(6, 1.0, [2], 0), tokenizer=SimpleNamespace(decode=str))
    found = check_endings(config, setup, {"rollout/eos_rate": rate, "rollout/response_length": 6.0})
    assert (found.level, words in found.text) == (level, True)


@pytest.mark.parametrize(("length", "warmup", "again"), [(6, 0, False), (6, 1, True), (3, 0, True)])
def test_a_first_update_with_nearly_all_tokens_is_the_largest(
    prompts_of: Make, length: int, warmup: int, again: bool
) -> None:
    made: list[int] = []
    settings = SimpleNamespace(value_warmup=warmup)
    trainer: Any = SimpleNamespace(rollouts=SimpleNamespace(), update=made.append, settings=settings)
    stream = PromptStream(prompts_of("ab"), 4, 0, 2)  # a batch has it twice
    policy, sampling = SimpleNamespace(device=torch.device("cpu")), Sampling(6, 1.0, [2], 0)
    setup: Any = make_dataclass("Parts", ["prompts", "sampling", "policy"])(stream, sampling, policy)
    first = rollout(torch.arange(6).expand(4, -1) < length, prompt_mask=torch.ones(4, 3, dtype=torch.bool))
    _, share = largest_update(setup, trainer, first)
    assert (share, made) == (1.0, [2 + warmup] if again else [])


def test_a_controller_that_cannot_move_and_a_gradient_that_is_none(doctor: Doctor) -> None:
    slow = "kl.controller={kind: ziegler, coef: 0.1, horizon: 1000000}"
    found = doctor(slow, "kl.placement=loss", "kl.estimator=k1")["beta"]
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
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"a": 4, "b": 3}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = doctor(f"reference.model='{copy}'", code=2)
    assert [level for level, text in found["config"] if "reference.model" in text] == ["fatal"]


def test_a_reward_model_is_tried_on_pairs(doctor: Doctor, tiny_reward_folder: Path, tmp_path: Path) -> None:
    reward = f"reward={{kind: model, model: '{tiny_reward_folder}'}}"
    ((_, text),) = doctor(reward)["reward"]
    assert "unknown" in text
    assert text.endswith("doctor --pairs FILE")
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in range(1, 9)]
    rows += [{"prompt": "a", "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    ((level, text),) = doctor(reward, options=("--pairs", jsonl(tmp_path / "p.jsonl", rows)))["reward"]
    assert level == "doubtful"
    assert numbers(text)[:3] == [50, 16, 50]  # right on 50 % of 16, as guessing is


def test_a_reward_model_is_tried_on_pairs_that_it_has_not_learned_from(
    doctor: Doctor, tiny_reward_folder: Path, tmp_path: Path
) -> None:
    """Of a data set's test split: those of `train` once passed as held out."""
    (tmp_path / "pairs").mkdir()
    for split, count in (("train", 30), ("test", 4)):
        rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * n} for n in range(1, count + 1)]
        jsonl(tmp_path / "pairs" / f"{split}.jsonl", rows)
    reward = f"reward={{kind: model, model: '{tiny_reward_folder}'}}"
    ((_, text),) = doctor(reward, options=("--pairs", str(tmp_path / "pairs")))["reward"]
    assert numbers(text)[1] == 4


@pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
def test_the_doctor_of_several_processes(doctor: Doctor) -> None:
    found = doctor("policy.shard=true", options=("--processes", "2"))
    assert "config" not in found  # alone, sharding has no effect
    assert found["memory"][0][0] == "fine"
    refused = doctor(options=("--processes", "3"), code=2)["config"]
    assert all(level == "fatal" and "3 processes share it" in text for level, text in refused)


@pytest.mark.parametrize(
    ("responses", "level", "words"),
    [
        (
            ["once", "twice", "thrice", "never"],
            "fine",
            "'b' -> 'twice': 0.25\n'c' -> 'thrice': 0.5",
        ),
        (["", " ", "", "once"], "doubtful", "75% of 4 "),
        (["<end>", "once", "<end>", "<end>"], "doubtful", "75% of 4 "),
        (["yes", "no", "yes", "no"], "fine", "'yes'"),
    ],
)
def test_samples_of_the_start_with_their_scores_and_a_doubt(responses: list[str], level: str, words: str) -> None:
    scores = {"reward": torch.arange(4) / 4}
    prompts = ["the end of a", "b", "c", "d"]
    found = check_samples(rollout(torch.ones(4, 2) > 0, prompts=prompts, responses=responses, scores=scores), None)
    assert found.level == level
    assert words in found.text
    assert bool(found.change) == (level == "doubtful")


# ---- the score that a KL allows


def read_table(scores: ReferenceScores, **kl: Any) -> tuple[dict[float, tuple[float, float]], str]:
    """KL -> score and share of the gain of best of n, and the note below; within 59 columns and 4 lines."""
    [found] = check_targets(config(kl=kl), scores)
    *table, note = found.text.split("\n")
    assert all(len(line) <= 59 for line in table)
    assert len(note) <= 118
    kls, best, shares = (line[17:].split() for line in table)
    rows = zip(map(float, kls), map(float, best), (float(share[:-1]) / 100 for share in shares), strict=True)
    return {kl: rest for kl, *rest in rows}, note  # type: ignore[misc]


NORMAL = [NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]


@pytest.mark.parametrize(("unit", "size"), [("token", 20.0), ("sequence", 1.0)])
def test_the_score_at_a_kl_by_the_gaussian_law(unit: str, size: float) -> None:
    """The gain is sd sqrt(2 KL per sequence); the best of 16 Gaussians is 1.766 sd above the mean."""
    rows, note = read_table(ReferenceScores([5.0 + 3.0 * x for x in NORMAL], [0] * 4096, 20.0), unit=unit, target=0.075)
    assert rows.keys() == ({0, 0.02, 0.05, 0.075, 0.1, 0.2} if unit == "token" else {0, 0.075, 0.2, 0.5, 1, 2})
    for kl, (score, share) in rows.items():
        if kl * size <= 2:
            assert score == pytest.approx(5.0 + 3.0 * math.sqrt(2 * kl * size), rel=0.01)
            assert share == pytest.approx(math.sqrt(2 * kl * size) / 1.766, abs=0.02)
    assert "target" not in note


def test_a_narrow_terminal_has_fewer_kls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "stdout_width", lambda: 60)
    scores = ReferenceScores(NORMAL, [0] * 4096, 20.0)
    rows, _ = read_table(scores, target=0.075)
    assert rows.keys() == {0, 0.075, 0.2}
    [found] = check_targets(config(kl={"target": 0.075}), scores)
    assert max(map(len, found.text.split("\n")[:-1])) <= 60 - len("doubtful  targets    ")


def test_right_or_wrong_is_known_up_to_the_log_of_a_prompts_samples() -> None:
    """One right answer of eight: KL(q || 1/8) in closed form, log 8 at most."""
    rows, note = read_table(ReferenceScores([1.0, *[0.0] * 7] * 60, [i // 8 for i in range(480)], 10.0), target=0.5)
    assert max(rows) < math.log(8) / 10
    for kl, (score, _) in rows.items():
        low, high = 1 / 8, 1.0
        for _ in range(50):
            q = (low + high) / 2
            divergence = q * math.log(8 * q) + (1 - q) * math.log((1 - q) / (7 / 8)) if q < 1 else math.log(8)
            low, high = (q, high) if divergence < 10 * kl else (low, q)
        factor = math.sqrt(8 / 7)  # for the spread of a prompt's few samples
        assert score == pytest.approx(1 / 8 + factor * (q - 1 / 8), abs=0.006)
    assert "480 reference samples" in note
    assert f"above a KL of {0.99 * math.log(8) / 10:.2g} (the target is 0.5)" in note


def test_few_samples_tell_only_a_low_kl_and_equal_ones_nothing() -> None:
    scores = ReferenceScores([NORMAL[(37 * i) % 4096] for i in range(64)], [i // 2 for i in range(64)], 20.0)
    rows, _ = read_table(scores, target=0.2)
    assert max(rows) < math.log(64 / 8) / 20 + 0.05
    assert not list(check_targets(config(), ReferenceScores([1.0] * 64, [i // 8 for i in range(64)], 20.0)))


def test_the_score_at_a_kl_by_enumerating_a_tiny_model(
    new_model: Callable[..., Any], letters: Any, prompts_of: Callable[..., Any]
) -> None:
    """Two tokens after two prompts, whose scores differ by 10: the tilt of all responses, with one beta for both."""
    lm, texts = LM(new_model(seed=3, spread=0.2)), ["ab", "cd"]
    values = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    chance = torch.empty(2, 7, 7)  # (prompt, first token, second token)
    for prompt, text in enumerate(texts):
        ids = letters(text)["input_ids"]
        rows = torch.tensor([[*ids, token] for token in range(7)])
        with torch.no_grad():
            first, second = lm.model(rows, attention_mask=torch.ones_like(rows)).logits[:, -2:].softmax(2).unbind(1)
        chance[prompt] = first[0][:, None] * second
    groups = [i // 2048 for i in range(4096)]
    sampled = reference_responses(
        lm, PromptStream(prompts_of(*texts), 64, 0), groups, Sampling(2, 1.0, [-1], 0), letters, 0
    )
    drawn = [(a, b) for responses, _ in sampled for a, b in responses.ids]
    scores = [float(values[pair]) + 10 * group for pair, group in zip(drawn, groups, strict=True)]
    table, _ = read_table(ReferenceScores(scores, groups, 2.0), target=0.1)
    assert len(table) == 6
    for kl, (score, _) in table.items():
        low, high = -6.0, 9.0
        for _ in range(60):  # log beta: a higher one has less KL
            middle = (low + high) / 2
            weights = chance * (values / math.exp(middle)).exp()
            weights /= weights.sum((1, 2), keepdim=True)
            divergence = float((weights * (weights / chance).log()).sum()) / 2
            low, high = (middle, high) if divergence > 2 * kl else (low, middle)
        assert score == pytest.approx(float((weights * values).sum()) / 2 + 5, abs=0.05), kl


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


def test_a_perplexity_above_a_guess_among_the_words_is_doubtful() -> None:
    """That of a guess among 300 words is 300, of random weights a little more. doctor called 4,800,000 fine."""
    fine, wrong = (judge("eval", perplexity=value, texts=20, words=300) for value in (301.0, 4.8e6))
    assert (fine.level, wrong.level) == ("fine", "doubtful")
    assert "4.8e+06" in wrong.text
    assert "300" in wrong.text
