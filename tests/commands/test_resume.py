"""A run that is killed and goes on is the run that never ended. Files and folders: tests/run/test_run.py."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_kl.commands import train as commands
from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import save_model
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.run import saving
from rlhf_kl.run.run import Run
from rlhf_kl.run.saving import Saving
from rlhf_kl.training import final, loop
from tests.runs import Cli, Killed, Train, rows, unfinished


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    found["config"]["run"].pop("output_dir")
    found.pop("seconds"), found.pop("git")  # somebody may commit while the tests run
    found["final"] = {key: v for key, v in found["final"].items() if not key.startswith(("time/", "perf/"))}
    return found


def assert_same_run(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    assert rows(one, "samples.jsonl") == rows(other, "samples.jsonl")
    assert rows(one, "tokens.jsonl") == rows(other, "tokens.jsonl")
    assert summary(one) == summary(other)
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    for file in files:
        first, second = load_file(one / file), load_file(other / file)
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


DRAWS = """
import random, numpy, torch

class Drawing:
    def __init__(self):
        self.calls = 0

    def __call__(self, prompts, responses):
        self.calls += 1
        noise = random.random() + numpy.random.rand() + float(torch.rand(()))
        return [response.count("a") / 8 + noise + self.calls / 10 for response in responses]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
"""
RUNS = {  # what is called when the run dies, at which call, and the run
    "update": (PPOTrainer, "backward", 9, ["ppo.lr_schedule=adaptive", "ppo.learning_rate=0.05", "kl.target=0.05"]),
    "checkpoint": (Saving, "_write", 2, ["policy.value=head", "policy.lora={r: 4, alpha: 8.0}"]),
    "rollout": (
        Rollouts,
        "sample",
        4,
        ["ppo.advantage=rloo", "rollout.samples_per_prompt=4", "reward.kind={draws}", "eval.scorers.x.kind={draws}"],
    ),
}


@pytest.mark.parametrize("moment", [pytest.param("update", marks=pytest.mark.quick), "checkpoint", "rollout"])
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    place, name, fatal, settings = RUNS[moment]
    (tmp_path / "draws.py").write_text(DRAWS)
    settings = [*settings, f"checkpoint.background={moment == 'rollout'}"]
    settings = [each.format(draws=f"{tmp_path}/draws.py:Drawing") if "draws" in each else each for each in settings]
    train(tmp_path / "whole", *settings)
    work, calls = getattr(place, name), iter(range(1, 1000))

    def dying(*arguments: Any) -> Any:
        if next(calls) == fatal:
            raise Killed
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, dying)
        with pytest.raises(Killed):
            train(tmp_path / "killed", *settings)
    before = rows(tmp_path / "killed")
    assert 2 < len(before) < 6
    if moment == "update":
        rates = [row["policy/learning_rate"] for row in before[:3]]
        assert rates[-1] < 0.5 * rates[0]  # the adaptive factor has moved: its state has to be kept
    train(tmp_path / "killed", *settings, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


PHASES = [  # what is called there
    (Run, "open"),
    (loop, "build_setup"),
    (loop, "prepare_training"),
    (Run, "_open_files"),
    (loop.TrainLoop, "announce"),
    (loop, "evaluate_policy"),
    (PPOTrainer, "backward"),
    (saving, "save_checkpoint"),
    (loop.TrainLoop, "finish"),
    (final, "save_model"),
    (Run, "finish"),
    (commands, "train_closing"),
]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase[1])
def test_ctrl_c_twice_ends_each_phase_with_one_line_and_the_run_goes_on(
    train: Train, tiny_run: Path, rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Any
) -> None:
    place, name = phase
    work = getattr(place, name)

    def pressed(*arguments: Any, **named: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
        return work(*arguments, **named)

    words = ["train", "--config", tiny_run / "config.yaml", "--output-dir", tmp_path / "run", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, pressed)
        code, out, err = rlhf_kl(*words)
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert re.match("interrupted; .*: rlhf-kl train ", err)
    assert rlhf_kl(*words, "--resume").code == 0
    assert_same_run(tiny_run, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").rglob(".*")} == {
        ".rlhf-kl.lock",
        ".rlhf-kl.copies",
        ".rlhf-kl.inputs",
    }


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("os error 28")])
def test_a_disk_that_fills_while_the_policy_is_written(
    train: Train, tiny_run: Path, rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(model: Any, tokenizer: Any, place: Path, tensors: Any) -> None:
        (place / "model.safetensors").write_text("half")
        raise error

    words = ["train", "--config", tiny_run / "config.yaml", "--output-dir", tmp_path / "run", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(final, "save_model", full)
        code, out, err = rlhf_kl(*words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {tmp_path / 'run'}: {error.args[-1]}; ")
    assert not list((tmp_path / "run").glob("*final*"))
    assert rlhf_kl(*words, "--resume").code == 0
    assert_same_run(tiny_run, tmp_path / "run")


@pytest.mark.quick
def test_one_seed_is_one_run_and_an_evaluation_does_not_disturb_it(train: Train, tmp_path: Path) -> None:
    """Its scores are random, and depend on what was scored before."""
    (tmp_path / "draws.py").write_text(DRAWS)
    settings = [f"{key}.kind={tmp_path}/draws.py:Drawing" for key in ("reward", "eval.scorers.x")]
    for often in (1, 6):
        train(tmp_path / f"every {often}", *settings, f"eval.every={often}")
    for one, other in zip(rows(tmp_path / "every 1"), rows(tmp_path / "every 6"), strict=True):
        assert {k: v for k, v in one.items() if k in other or not k.startswith("eval/")} == other
    train(tmp_path / "other", *settings, "run.seed=1", "ppo.total_episodes=16")
    assert rows(tmp_path / "other")[0] != rows(tmp_path / "every 1")[0]


def test_other_content_under_the_same_name_is_refused(
    train: Train, tmp_path: Path, tiny_folder: Path, tiny_data: Any, letters: Any, new_model: Callable[..., Any]
) -> None:
    start, own = Path(shutil.copytree(tiny_folder, tmp_path / "start")), tmp_path / "prompts.jsonl"
    own.write_bytes(tiny_data.prompts.read_bytes())
    settings = (f"policy.model='{start}'", f"data.prompts='{own}'", "ppo.total_episodes=32")
    train(tmp_path / "run", *settings)
    crashed = unfinished(tmp_path / "run", tmp_path / "crashed", 2)

    def refused(what: str) -> None:
        with pytest.raises(InputError, match=f"{what}: its content") as caught:
            train(crashed, *settings, resume=True)
        assert len(caught.value.problems) == 1

    tensors = load_file(start / "model.safetensors")
    tensors["transformer.ln_f.bias"][3] += 1e-6
    save_file(tensors, start / "model.safetensors", metadata={"format": "pt"})
    refused(r"reference\.model")
    save_model(new_model(spread=0.1), letters, start)
    (start / "chat_template.jinja").write_text("{{ messages }}")
    refused(r"the tokenizer of policy\.model")
    (start / "chat_template.jinja").unlink()
    own.write_text(own.read_text().replace('"ab"', '"ba"', 1))
    refused(r"data\.prompts")
