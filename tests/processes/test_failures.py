"""What goes wrong in one process is known to both."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.sharding import can_shard
from tests.made import Make
from tests.runs import rows, sets
from tests.servers import says, scores, serving

REWARD = """
import math, os, time
from pathlib import Path

CALLS = 0

def second():
    return os.environ["RANK"] == "1"

def count_calls():
    global CALLS
    CALLS += 1
    return CALLS

def breaks(prompts, responses):
    if second() and count_calls() == 9:
        raise ValueError("out of ink")
    return [response.count("a") / 8 for response in responses]

def skips(prompts, responses):
    late = second() and count_calls() > 8
    return [None if late else response.count("a") / 8 for response in responses]

def slow(prompts, responses, place):
    calls = count_calls()
    if calls == 9:
        Path(place, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(0.2)
    return [response.count("a") / 8 for response in responses]
"""


@pytest.fixture
def settings(tmp_path: Path, tiny_settings: dict[str, Any]) -> Make:
    """settings("breaks", a=b): breaks.yaml, whose reward is this function of both processes, where there is one."""

    def write(function: str, **sections: Any) -> Path:
        (tmp_path / "mine.py").write_text(REWARD)
        attribute = function if f"def {function}" in REWARD else "skips"
        reward = {"kind": f"{tmp_path / 'mine.py'}:{attribute}", "missing_eos_penalty": 0.0}
        reward |= {"place": str(tmp_path)} if function == "slow" else {}
        config = {**tiny_settings, "reward": reward, "eval": tiny_settings["eval"] | {"every": 1000}, **sections}
        (tmp_path / f"{function}.yaml").write_text(yaml.safe_dump(config))
        return tmp_path / f"{function}.yaml"

    return write


def test_one_process_s_problem_is_told_once_and_ends_both(
    together: Make, settings: Make, tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    """One after the other: a reward that fails, one that cannot score, sizes that do not divide, and two mistakes."""
    rollout = tiny_settings["rollout"] | {"batch_size": 15}
    ppo = tiny_settings["ppo"] | {"minibatch_size": 15, "microbatch_size": 5, "total_episodes": 60}
    configs = [
        settings("breaks"),
        settings("skips"),
        settings("odd", rollout=rollout, ppo=ppo),
        settings("misspelt", ppo={"minibatch_sise": 4}),
    ]
    commands = [["train", "--config", c, "--output-dir", tmp_path / c.stem, "--quiet"] for c in configs]
    result = together([*commands, ["train", "--nonsense"]])
    assert result.codes == [[2, 0, 2, 2, 2]] * 2, result.output
    for message in (
        "raised ValueError: out of ink",
        "rollout.batch_size: 15 is not a multiple of 2: 2 processes share it",
        "ppo.minibatch_sise",
        "--nonsense",
    ):
        assert result.output.count(message) == 1, (message, result.output)
    assert "Traceback" not in result.output
    assert not (tmp_path / "odd" / "config.yaml").exists()
    rows = [row for row in read_jsonl(tmp_path / "skips" / "metrics.jsonl") if "kl/token" in row]
    assert (rows[-1]["rollout/unscored"], rows[-1]["policy/epochs"]) == (8, 2.0)


def test_a_server_that_fails_one_process_ends_both_with_a_checkpoint(
    together: Make, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In update 4, once: the same command with --resume ends as a run without faults."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    metrics, refused = tmp_path / "run" / "metrics.jsonl", list[int]()

    def refuses(handler: Any, body: Any) -> None:
        now = not refused and metrics.is_file() and len(read_jsonl(metrics)) == 3
        refused.extend([1] * now)
        (says("no ink", 400) if now else scores())(handler, body)

    with serving(usual=refuses) as server:
        changes = {"reward": {"kind": "http", "url": server.url, "batch": 1000}, "checkpoint": {"every": 5}}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_settings | changes))
        train = ["train", "--config", tmp_path / "c.yaml", "--quiet", "--output-dir"]
        commands = [[*train, tmp_path / "run"], [*train, tmp_path / "run", "--resume"], [*train, tmp_path / "whole"]]
        result = together(commands)
        sizes = [len(request.body["responses"]) for request in server.requests]
    assert sizes.count(8) >= 2 * 2 * 6  # each process asks for its own half of a batch
    assert result.codes == [[1, 0, 0]] * 2, result.output
    assert result.output.count("no ink") == 1
    assert "checkpoint of step 3" in result.output
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.fixture
def start_slow(launch: Make, settings: Make, tiny_settings: dict[str, Any], tmp_path: Path) -> Make:
    """A run that is under way, the processes of its ranks, and how to go on with it."""

    def start() -> tuple[Any, list[int], list[Any]]:
        config = settings("slow", ppo=tiny_settings["ppo"] | {"total_episodes": 320})
        words = ["train", "--config", config, "--output-dir", tmp_path / "run", "--quiet"]
        process, marks = launch(["-m", "rlhf_kl", *words]), [tmp_path / str(rank) for rank in range(2)]
        deadline = time.monotonic() + 120
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process, [int(mark.read_text()) for mark in marks], [*words, "--resume"]

    return start


def test_a_signal_to_one_process_stops_both_after_the_update(start_slow: Make, tmp_path: Path) -> None:
    process, ranks, _ = start_slow()
    os.kill(ranks[1], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the same command with --resume" in output
    steps = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].step == steps[-1]
    assert json.loads((tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:06d}" / "state.json").read_text())


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_torchrun_ends_both_with_one_line_and_resume_goes_on(
    start_slow: Make, launch: Make, tmp_path: Path, times: int
) -> None:
    """A terminal's Ctrl-C reaches torchrun alone: its processes have sessions of their own."""
    process, ranks, words = start_slow()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, _ = process.communicate(timeout=60)
    assert output.count("the same command with --resume") == 1
    assert output.count("Traceback") == output.count("SignalException: Process") == times  # torchrun's own
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    steps = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    if times == 1:  # the update was finished
        assert checkpoints(tmp_path / "run" / "checkpoints")[-1].step == steps[-1]
        return
    process = launch(["-m", "rlhf_kl", *words])
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [*range(1, 22)]


@pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
@pytest.mark.parametrize(("rank", "background"), [("0", False), ("1", True)])
def test_a_disk_that_is_full_for_the_part_of_one_process_ends_both(
    launch: Make,
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    background: bool,
) -> None:
    monkeypatch.setenv("ENDED_BY", "ENOSPC")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", tmp_path / "tiny.yaml", "--output-dir", tmp_path / "run", "--quiet"]
    words += ["--set", "policy.shard=true", "--set", f"checkpoint.background={background}"]
    process = launch([Path(__file__).with_name("killed_command.py"), rank, "shard", *words])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert output.count("No space left on device") == 1, output
    (left,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert left.step == 2
    assert left.state()
    assert not list(left.path.parent.glob(".*"))


@pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
def test_an_engine_that_fails_one_process_ends_both_with_a_checkpoint(
    launch: Make, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid the weights of a sharded policy, which both gather to the end: none waits for the other."""
    monkeypatch.setenv("ENDED_BY", "ENOSPC")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings | {"checkpoint": {"every": 5}}))
    words = ["train", "--config", tmp_path / "tiny.yaml", "--output-dir", tmp_path / "run", "--quiet"]
    words += sets("policy.shard=true", "reference.shard=true", "rollout.engine=vllm", "eval.every=1000")
    began = time.monotonic()
    process = launch([Path(__file__).with_name("killed_command.py"), "1", "weights", *words])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert output.count("rollout.engine: vllm: ") == 1, output
    (left,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert left.step == len([row for row in rows(tmp_path / "run") if "kl/token" in row]) > 0
