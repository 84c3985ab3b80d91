"""A run that ends anywhere and goes on is the run that never ended."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.text import format_number

Train = Callable[..., dict[str, Any]]


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Without what depends on the clock and the machine."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / name)
    ]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "final" / "model.safetensors") | load_file(folder / "final" / "value.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    assert rows(one, "samples.jsonl") == rows(other, "samples.jsonl")
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_summary(one: Path, other: Path) -> None:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for summary in summaries:
        summary["config"]["run"].pop("output_dir")
        summary.pop("seconds")
        for key in [key for key in summary["final"] if key.startswith(("time/", "perf/"))]:
            summary["final"].pop(key)
    assert summaries[0] == summaries[1]


def crash(whole: Path, place: Path, kept: int) -> Path:
    """A copy that ends after checkpoint `kept`, with rows beyond it and nothing that comes at the end."""
    crashed = Path(shutil.copytree(whole, place / "crashed"))
    (crashed / "summary.json").unlink()
    shutil.rmtree(crashed / "final")
    for checkpoint in checkpoints(crashed / "checkpoints"):
        if checkpoint.step > kept:
            shutil.rmtree(checkpoint.path)
    return crashed


# ---- resume ----


@pytest.mark.parametrize(
    ("kept", "settings"),
    [
        pytest.param(2, ["policy.value=features"], marks=pytest.mark.quick),
        (4, ["policy.value=features"]),
        (4, ["policy.value=head"]),
        (4, ["policy.value=separate"]),
        (4, ["ppo.advantage=rloo", "rollout.samples_per_prompt=4"]),
        (2, ["ppo.advantage=grpo", "rollout.samples_per_prompt=2"]),
    ],
    ids=lambda value: value if isinstance(value, int) else value[0],
)
def test_a_crashed_run_goes_on_as_if_nothing_had_been(
    train: Train, tmp_path: Path, kept: int, settings: list[str]
) -> None:
    """Killed after later rows were written: those are computed again, and nothing is there twice."""
    whole = tmp_path / "whole"
    train(whole, *settings)
    crashed = crash(whole, tmp_path, kept)
    train(crashed, *settings, resume=True)
    assert_same_run(whole, crashed)


def test_a_resumed_run_keeps_the_learning_rate_that_was_found(train: Train, tmp_path: Path) -> None:
    settings = ("ppo.lr_schedule=adaptive", "ppo.learning_rate=0.05", "kl.target=0.05")
    law = "kl.controller={kind: adaptive, coef: 0.1}"
    whole = tmp_path / "whole"
    train(whole, *settings, law)
    crashed = crash(whole, tmp_path, 2)
    changed = [row for row in read_jsonl(whole / "metrics.jsonl") if "learning-rate-changed" in str(row.get("alerts"))]
    assert changed[0]["step"] <= 2
    train(crashed, *settings, law, resume=True)
    assert_same_run(whole, crashed)


@pytest.mark.parametrize("kept", [4, 6], ids=["in the middle", "before its end"])
def test_the_summary_of_a_resumed_run_is_that_of_the_whole(
    train: Train, tiny_run: Path, tmp_path: Path, kept: int
) -> None:
    crashed = crash(tiny_run, tmp_path, kept)
    train(crashed, resume=True)
    assert_same_run(tiny_run, crashed)
    assert_same_summary(tiny_run, crashed)


def test_the_display_of_a_resumed_run_starts_where_the_run_did(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    train(crashed, resume=True, console=terminal)
    first, *_, last = [
        row["eval/perplexity"] for row in rows(tiny_run) if "objective/scores" in row and "eval/perplexity" in row
    ]
    shown = terminal.file.getvalue()
    assert last != first
    assert f"{format_number(last)} held-out, {format_number(first)} at the start" in shown


SIGNALLING = """
import os, pathlib, signal
place = pathlib.Path(__file__).parent / "calls"

def count(prompts, responses, letter: str = "a", at: int = 0):
    calls = int(place.read_text()) + 1 if place.exists() else 1
    place.write_text(str(calls))
    if calls == at:
        os.kill(os.getpid(), signal.SIG{name})
    return [response.count(letter) / 8 for response in responses]
"""


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_an_interrupted_run_saves_its_last_update_and_goes_on(
    train: Train, tmp_path: Path, name: str, code: int
) -> None:
    (tmp_path / "own.py").write_text(SIGNALLING.replace("{name}", name))
    reward, steps = f"reward.kind={tmp_path}/own.py:count", "checkpoint.every=100"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, reward, steps)
    (tmp_path / "calls").unlink()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        # Four batches of the reference, the evaluation before update 1, then once an update.
        _signalled(train, tmp_path, stopped, reward, steps, name)
    assert caught.value.exit_code == code
    assert signal.getsignal(signal.SIGINT) is handler
    done = len(rows(stopped))
    assert 0 < done < 6
    assert [c.step for c in checkpoints(stopped / "checkpoints")] == [done]
    train(stopped, reward, steps, resume=True)
    assert_same_run(whole, stopped)


def _signalled(train: Train, place: Path, folder: Path, reward: str, steps: str, name: str) -> None:
    source = (place / "own.py").read_text()
    (place / "own.py").write_text(source.replace("at: int = 0", "at: int = 8"))
    try:
        train(folder, reward, steps)
    finally:
        (place / "own.py").write_text(source)


def test_resuming_with_another_config_is_refused(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    with pytest.raises(InputError) as caught:
        train(crashed, "kl.target=0.2", "eval.every=1", resume=True)
    assert len(caught.value.problems) == 3  # with the way out; eval.every is free to change
    assert "kl.target: 0.1 -> 0.2" in str(caught.value)


def test_a_finished_run_is_not_run_again(train: Train, tiny_run: Path) -> None:
    before = (tiny_run / "metrics.jsonl").stat().st_mtime_ns
    again = train(tiny_run, resume=True)
    assert again == json.loads((tiny_run / "summary.json").read_text())
    assert again["final"]["step"] == 6
    assert (tiny_run / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.quick
def test_one_seed_is_one_run(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    train(tmp_path / "same")
    assert_same_run(tiny_run, tmp_path / "same")
    train(tmp_path / "other", "run.seed=1", "ppo.total_episodes=16")
    assert rows(tmp_path / "other")[0] != rows(tiny_run)[0]


# ---- damaged, missing and foreign files ----


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"])
def test_a_damaged_newest_checkpoint_costs_its_updates_and_nothing_else(
    train: Train, tiny_run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    data = bytearray((crashed / "checkpoints" / "step-000004" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (crashed / "checkpoints" / "step-000004" / name).write_bytes(data)
    train(crashed, resume=True)
    messages = " ".join(capsys.readouterr().err.split())
    assert "damaged checkpoint step-000004" in messages
    assert "going on from step-000002" in messages
    assert_same_run(tiny_run, crashed)
    assert [path.name for path in sorted((crashed / "checkpoints").iterdir())] == [
        f"step-{step:06d}" for step in (2, 4, 6)
    ]


def test_without_a_whole_checkpoint_nothing_is_overwritten(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    for checkpoint in checkpoints(crashed / "checkpoints"):
        (checkpoint.path / "optimizer.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in crashed.rglob("*") if path.is_file() and ".lock" not in path.name}
    with pytest.raises(InputError, match="every checkpoint is damaged") as caught:
        train(crashed, resume=True)
    assert len(caught.value.problems) == 3  # both checkpoints, and what to do
    assert {path: path.read_bytes() for path in before} == before


def _sign(folder: Path) -> None:
    names = [path.name for path in folder.iterdir() if path.name != "checksums.json"]
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "checksums.json").write_text(json.dumps(digests))


def _as_the_version_before(checkpoint: Path) -> None:
    """Without the number of its format, and otherwise whole."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["format"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    _sign(checkpoint)


def test_a_checkpoint_of_another_version_is_refused_in_one_line_and_still_evaluated(
    rlhf_kl: Callable[..., Any], train: Train, tiny_run: Path, tmp_path: Path
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    before = rows(crashed)
    for checkpoint in checkpoints(crashed / "checkpoints"):
        _as_the_version_before(checkpoint.path)
    for changed in ((), ("ppo.gamma=0.5",)):  # whatever else is wrong too
        with pytest.raises(InputError, match=r"step-000004: written by another version.*--overwrite") as caught:
            train(crashed, *changed, resume=True)
        assert len(caught.value.problems) == 1
        assert caught.value.exit_code == 2
    assert rows(crashed) == before
    for command in (("eval", "--json"), ("generate", "--prompt", "a")):
        outcome = rlhf_kl(*command, "--run", crashed, "--checkpoint", "4")
        assert outcome.code == 0, outcome.err
    assert rlhf_kl("report", crashed).code == 0
    (checkpoints(crashed / "checkpoints")[-1].path / "state.json").write_text("{")  # damaged: the one before counts
    with pytest.raises(InputError, match="step-000002: written by another version"):
        train(crashed, resume=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "kl', b"\x00" * 700, b'{"step": 5}\n{"step": 5}\n'])
def test_whatever_stands_behind_the_checkpoint_is_cut_off(
    train: Train, tiny_run: Path, tmp_path: Path, name: str, tail: bytes
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    state = json.loads((crashed / "checkpoints" / "step-000004" / "state.json").read_text())
    known = (crashed / name).read_bytes()[: state["lengths"][name]]
    (crashed / name).write_bytes(known + tail)
    train(crashed, resume=True)
    assert_same_run(tiny_run, crashed)


def test_rows_that_the_checkpoint_knew_and_that_are_gone_are_reported(
    train: Train, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    lines = (crashed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (crashed / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    train(crashed, resume=True)
    assert "rows are missing" in " ".join(capsys.readouterr().err.split())
    assert [row["step"] for row in rows(crashed)] == [1, 2, 5, 6, 7]


def test_an_old_checkpoint_that_a_killed_run_did_not_get_to_drop_is_dropped(
    train: Train, tiny_run: Path, tmp_path: Path
) -> None:
    crashed = crash(tiny_run, tmp_path, 6)
    train(crashed, "checkpoint.keep=1", resume=True)
    assert [checkpoint.step for checkpoint in checkpoints(crashed / "checkpoints")] == [6]


def test_what_killed_runs_left_is_cleared_up(train: Train, tiny_run: Path, tmp_path: Path) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    for name in (".final.999.tmp", "checkpoints/.step-000006.999.tmp", "checkpoints/.step-000001.removed"):
        (crashed / name).mkdir()
        (crashed / name / "model.safetensors").write_bytes(b"half")
    train(crashed, resume=True)
    left = [path.name for path in (*crashed.iterdir(), *(crashed / "checkpoints").iterdir())]
    assert not [name for name in left if name.endswith((".tmp", ".removed"))]


def test_another_reference_or_tokenizer_under_the_same_name_is_refused(
    train: Train, tmp_path: Path, tiny_folder: Path, letters: Any, new_model: Callable[..., Any]
) -> None:
    from rlhf_kl.models.load import save_model

    start = Path(shutil.copytree(tiny_folder, tmp_path / "start"))
    policy, short = f"policy.model='{start}'", ("ppo.total_episodes=64", "checkpoint.every=2")
    train(tmp_path / "run", policy, *short)
    crashed = crash(tmp_path / "run", tmp_path, 2)
    weights_file = start / "model.safetensors"
    tensors = load_file(weights_file)
    tensors["transformer.ln_f.bias"][3] += 1e-6
    save_file(tensors, weights_file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"reference\.model: its content has changed"):
        train(crashed, policy, *short, resume=True)
    save_model(new_model(spread=0.1), letters, start)
    (start / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match=r"the tokenizer of policy\.model: its content has changed"):
        train(crashed, policy, *short, resume=True)
    (start / "chat_template.jinja").unlink()
    train(crashed, policy, *short, resume=True)
    assert_same_run(tmp_path / "run", crashed)


def test_other_prompts_under_the_same_name_are_refused(train: Train, tmp_path: Path, tiny_data: Any) -> None:
    own = tmp_path / "prompts.jsonl"
    own.write_bytes(tiny_data.prompts.read_bytes())
    prompts, short = f"data.prompts='{own}'", "ppo.total_episodes=64"
    train(tmp_path / "run", prompts, short)
    crashed = crash(tmp_path / "run", tmp_path, 2)
    own.write_text(own.read_text().replace('"ab"', '"ba"', 1))
    with pytest.raises(InputError, match=r"data\.prompts: its content has changed"):
        train(crashed, prompts, short, resume=True)


# ---- what may change ----


def test_more_episodes_go_on_from_a_finished_run(train: Train, tmp_path: Path) -> None:
    short, longer = (("ppo.lr_schedule=constant", f"ppo.total_episodes={count}") for count in (64, 96))
    train(tmp_path / "whole", *longer)
    train(tmp_path / "run", *short)
    assert train(tmp_path / "run", *short, resume=True)["steps"] == 4
    assert train(tmp_path / "run", *longer, resume=True)["steps"] == 6
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")  # the closing evaluation after update 4 is gone again
    with pytest.raises(InputError, match=r"ppo\.total_episodes: 96 -> 64"):
        train(tmp_path / "run", *short, resume=True)


@pytest.mark.parametrize(
    "other",
    [
        "ppo.lr_schedule=linear",
        "ppo.lr_schedule=constant kl.controller={kind: schedule, coef: 0.1, end_coef: 0.2}",
        "ppo.lr_schedule=constant kl.controller={kind: ziegler, coef: 0.1}",
    ],
)
def test_more_episodes_are_refused_where_something_depends_on_their_number(
    train: Train, tmp_path: Path, other: str
) -> None:
    settings = other.split(" ", 1)
    train(tmp_path / "run", *settings, "ppo.total_episodes=32")
    with pytest.raises(InputError, match=r"ppo\.total_episodes: 32 -> 6400"):
        train(tmp_path / "run", *settings, "ppo.total_episodes=6400", resume=True)


def test_more_episodes_are_fine_where_the_horizon_is_written(train: Train, tmp_path: Path) -> None:
    law = ("kl.controller={kind: ziegler, coef: 0.1, horizon: 100}", "ppo.lr_schedule=constant")
    train(tmp_path / "run", *law, "ppo.total_episodes=32")
    assert train(tmp_path / "run", *law, "ppo.total_episodes=48", resume=True)["steps"] == 3


def test_a_finished_run_of_another_config_is_not_passed_off_as_this_one(
    train: Train, tiny_run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    with pytest.raises(InputError, match=r"kl\.target: 0\.1 -> 0\.2"):
        train(copy, "kl.target=0.2", resume=True)
    assert train(copy, "eval.every=1", resume=True)["steps"] == 6


def test_a_smaller_microbatch_may_go_on_and_is_reported(
    train: Train, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    train(crashed, "ppo.microbatch_size=4", resume=True)
    assert "ppo.microbatch_size: 8 -> 4" in capsys.readouterr().err
    assert rows(crashed)[-1]["step"] == 7


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_resumed_run_has_the_threads_that_it_had(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tmp_path / "run", "ppo.total_episodes=32")
        torch.set_num_threads(1)
        train(tmp_path / "run", "ppo.total_episodes=48", resume=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert "threads" not in capsys.readouterr().err


def test_other_threads_or_versions_are_reported(
    train: Train, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = crash(tiny_run, tmp_path, 4)
    path = crashed / "checkpoints" / "step-000004"
    state = json.loads((path / "state.json").read_text())
    assert state["environment"]["threads"] == str(torch.get_num_threads())
    assert state["environment"]["torch"] == version("torch")
    train(crashed, resume=True)
    assert "resume:" not in capsys.readouterr().err  # nothing to say
    crashed = crash(tiny_run, tmp_path / "again", 4)
    path = crashed / "checkpoints" / "step-000004"
    state["environment"] |= {"threads": "64", "torch": "1.0"}
    (path / "state.json").write_text(json.dumps(state))
    _sign(path)
    train(crashed, resume=True)
    messages = " ".join(capsys.readouterr().err.split())
    assert f"threads 64 -> {torch.get_num_threads()}" in messages
    assert "torch 1.0 -> " in messages


# ---- numbers that a reward function draws ----

NOISY = """
import random
import numpy
import torch

def noisy(prompts, responses):
    def draw():
        return random.random() + numpy.random.rand() + float(torch.rand(()))
    return [response.count("a") / 8 + draw() for response in responses]
"""


def test_a_reward_function_that_draws_numbers_draws_the_same_ones(train: Train, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    reward = f"reward.kind={tmp_path}/noisy.py:noisy"
    train(tmp_path / "run", reward)
    train(tmp_path / "twin", reward)
    assert_same_run(tmp_path / "run", tmp_path / "twin")
    crashed = crash(tmp_path / "run", tmp_path, 4)
    train(crashed, reward, resume=True)
    assert_same_run(tmp_path / "run", crashed)
    train(tmp_path / "often", reward, "eval.every=1")  # an evaluation does not disturb the run
    training = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(tmp_path / "run")]
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(tmp_path / "often")] == training


# ---- signals ----

SLOW = """
import os, pathlib, signal, time
place = pathlib.Path(__file__).parent / "calls"

def count(prompts, responses):
    calls = int(place.read_text()) + 1 if place.exists() else 1
    place.write_text(str(calls))
    if calls == {at}:
        os.kill(os.getpid(), signal.SIGTERM)
        {then}
        time.sleep(60)
    return [response.count("a") / 8 for response in responses]
"""


@pytest.mark.parametrize(
    ("then", "grace"),
    [("pass", 0.2), ("time.sleep(0.5); os.kill(os.getpid(), signal.SIGINT)", 100), ("pass", 0)],
    ids=["the grace period ends", "a second signal", "no grace"],
)
def test_an_update_that_does_not_end_is_cut_short(train: Train, tmp_path: Path, then: str, grace: float) -> None:
    (tmp_path / "own.py").write_text(SLOW.format(at=10, then=then))
    reward = (f"reward.kind={tmp_path}/own.py:count", f"checkpoint.grace={grace}")
    began = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        train(tmp_path / "run", *reward)
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 143
    left = checkpoints(tmp_path / "run" / "checkpoints")
    assert [checkpoint.step for checkpoint in left] == [2]
    assert left[0].damage() is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    train(tmp_path / "run", *reward, resume=True)
    (tmp_path / "calls").unlink()
    (tmp_path / "own.py").write_text(SLOW.format(at=0, then="pass"))
    train(tmp_path / "whole", *reward)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
