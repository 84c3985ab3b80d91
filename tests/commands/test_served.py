"""Runs whose reward is behind a URL: faults of the server, secrets, and what other commands make of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl import remote
from rlhf_kl.errors import ServiceFailed
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl
from tests.runs import Cli, Train, rows, sets
from tests.servers import Server, closes, says, scores, serving

SECRET = "sk-5e0b7c21d94f"
# The function of `tiny_settings`, in a process of its own.
PROGRAM = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"scores": [text.count("a") / 8 for text in asked["responses"]]}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def http(url: str, **options: Any) -> str:
    return "reward=" + json.dumps({"kind": "http", "url": url, **options})


# ---- the config


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"kind": "http"}, ["reward.url: missing"]),
        ({"kind": "http", "url": "http://x", "timout": 3}, ["reward.timout: .* mean reward.timeout"]),
        ({"kind": "http", "url": "ftp://x", "retries": -1}, ["reward.url: 'ftp://x'", "reward.retries: -1"]),
        ({"kind": "http", "url": "http://x", "form": "trl"}, ["reward.form: 'trl' .*openrlhf"]),
        ({"kind": "http", "url": "http://x", "model": "m", "interface": "trl"}, ["reward.interface", "reward.model"]),
        ({"kind": "htpp", "url": "http://x"}, ["reward.kind .*mean http"]),
        ({"url": "http://x"}, ["reward.url: .*reward.kind: http"]),
        ({"kind": "sum", "terms": {"x": {"kind": "http"}}}, ["reward.terms.x.url: missing"]),
    ],
)
def test_wrong_options_are_told_by_their_keys(
    rlhf_kl: Cli, tmp_path: Path, reward: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"reward": reward}))
    outcome = rlhf_kl("config", "validate", tmp_path / "c.yaml")
    assert outcome.code == 2
    lines = outcome.err.splitlines()
    assert len(lines) == len(words), lines
    assert all(re.search(f"error: {each}", line) for each, line in zip(words, lines, strict=True)), lines


def test_a_variable_that_is_not_set_ends_a_run_before_it_begins(
    rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RM_TOKEN", raising=False)
    reward = {"kind": "http", "url": "${RM_TOKEN}/score", "headers": {"Authorization": "Bearer ${RM_TOKEN}"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"reward": {"kind": "sum", "terms": {"x": reward}}}))
    outcome = rlhf_kl("config", "validate", tmp_path / "c.yaml")
    assert (outcome.code, outcome.err.count("note: ")) == (0, 2)
    outcome = rlhf_kl("train", "--config", tmp_path / "c.yaml", "--output-dir", tmp_path / "run")
    assert outcome.code == 2
    assert "reward.terms.x.headers.Authorization: the environment variable RM_TOKEN" in outcome.err
    assert "reward.terms.x.url: the environment variable RM_TOKEN" in outcome.err
    assert not (tmp_path / "run").exists()


def test_reading_a_config_loads_neither_torch_nor_the_client(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"reward": {"kind": "http", "url": "http://x.org"}}))
    code = f"""
import sys
from rlhf_kl import cli
assert cli.run(["config", "validate", {str(tmp_path / "c.yaml")!r}]) == 0
assert not {{"torch", "requests"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- runs


def test_a_served_reward_is_the_function_that_it_serves(
    train: Train, tiny_run: Path, server: Server, tmp_path: Path
) -> None:
    """Though some of its requests fail: the same rows, to the last digit."""
    server.plan = [says("", 503)] + [closes if i % 7 == 3 else server.usual for i in range(20)]
    train(tmp_path / "run", http(server.url, batch=5, missing_eos_penalty=0.0))
    assert rows(tmp_path / "run") == rows(tiny_run)
    assert rows(tmp_path / "run", "samples.jsonl") == rows(tiny_run, "samples.jsonl")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts PROGRAM on the same port each time."""
    with serving() as server:  # which finds a free one
        port = server.http.server_port
    (tmp_path / "server.py").write_text(PROGRAM)
    started = list[subprocess.Popen[bytes]]()

    def start() -> subprocess.Popen[bytes]:
        words = [sys.executable, str(tmp_path / "server.py"), str(port)]
        started.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
        return started[-1]

    start.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield start
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_changes_nothing(
    rlhf_kl: Cli, tiny_run: Path, tiny_settings: dict[str, Any], process: Any, tmp_path: Path
) -> None:
    """It is not there at the beginning either."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_settings))
    run, killed = tmp_path / "run", list[int]()

    def faults() -> None:
        time.sleep(1.0)
        first = process()
        while not (run / "metrics.jsonl").is_file() or len(read_jsonl(run / "metrics.jsonl")) < 2:
            time.sleep(0.005)
        os.kill(first.pid, signal.SIGKILL)
        killed.append(first.wait())
        time.sleep(1.5)
        process()

    thread = threading.Thread(target=faults, daemon=True)
    thread.start()
    changes = sets(http(process.url, missing_eos_penalty=0.0))
    outcome = rlhf_kl("train", "--config", tmp_path / "c.yaml", "--output-dir", run, *changes)
    assert outcome.code == 0, outcome.err
    thread.join()
    assert killed == [-signal.SIGKILL]
    assert outcome.err.count("refused") >= 2  # before it was started, and after it was killed
    assert rows(run) == rows(tiny_run)
    assert rows(run, "samples.jsonl") == rows(tiny_run, "samples.jsonl")


DRIFTS = """
import random

class Drifts:
    seen = 0
    def __call__(self, prompts, responses):
        self.seen += len(responses)
        return [self.seen / 100 + random.random() for _ in responses]
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
"""


@pytest.mark.parametrize(("done", "requests", "kept"), [(2, 0, [2]), (2, 1, [2]), (6, 0, [5, 6])])
def test_a_server_that_stays_dead_ends_the_run_with_a_checkpoint(
    train: Train,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    done: int,
    requests: int,
    kept: list[int],
) -> None:
    """At the evaluation before update 3, in that update, or at the end; a function with a state is always called first.

    It draws numbers too.
    """
    monkeypatch.setattr(remote, "PAUSES", (0.01,))
    (tmp_path / "mine.py").write_text(DRIFTS)

    def reward(url: str) -> str:
        served = {"kind": "http", "url": url, "retries": 1, "batch": 1000}
        return "reward=" + json.dumps(
            {"kind": "sum", "terms": {"x": {"kind": f"{tmp_path}/mine.py:Drifts"}, "y": served}}
        )

    train(tmp_path / "whole", reward(server.url), "checkpoint.every=5")
    since = list[int]()

    def dies(handler: Any, body: Any) -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        if metrics.is_file() and len(read_jsonl(metrics)) >= done:
            since.append(1)
        (closes if len(since) > requests else scores())(handler, body)

    server.usual = dies
    words = rf"^reward\.terms\.y: after 2 tries: .*closed.*; the checkpoint of step {done} .*--resume"
    with pytest.raises(ServiceFailed, match=words) as caught:
        train(tmp_path / "run", reward(server.url), "checkpoint.every=5")
    assert caught.value.exit_code == 1
    assert [each.step for each in checkpoints(tmp_path / "run" / "checkpoints")] == kept
    assert len(since) == requests + 2
    with serving() as other:  # it has moved
        train(tmp_path / "run", reward(other.url), "checkpoint.every=5", resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert rows(tmp_path / "run", "samples.jsonl") == rows(tmp_path / "whole", "samples.jsonl")


@pytest.mark.slow
def test_a_secret_of_a_header_reaches_no_file_and_no_server_without_leave(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_TOKEN", SECRET)
    reward = {"kind": "http", "url": server.url, "headers": {"Authorization": "Bearer ${RM_TOKEN}"}}
    run = tmp_path / "run"
    settings = tiny_settings | {"reward": reward, "tracking": {"tensorboard": True}}
    settings["ppo"] = settings["ppo"] | {"total_episodes": 32}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    outcome = rlhf_kl("train", "--config", tmp_path / "c.yaml", "--output-dir", run)
    assert outcome.code == 0, outcome.err
    assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {SECRET}"}
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "Bearer ${RM_TOKEN}" in (run / "config.yaml").read_text()
    assert SECRET not in outcome.out + outcome.err
    server.requests.clear()
    without = rlhf_kl("eval", "--run", run, "--json")
    assert (without.code, json.loads(without.out)["scores"]) == (0, None)
    assert server.url in without.err
    assert rlhf_kl("generate", "--run", run, "--scores").code == 2
    assert server.requests == []
    assert isinstance(json.loads(rlhf_kl("eval", "--run", run, "--plugins", "--json").out)["scores"], float)
    shown = json.loads(rlhf_kl("generate", "--run", run, "--plugins", "--scores", "--json").out)
    assert all(row["score"] == row["response"].count("a") / 8 for row in shown)
    scaled = json.loads(rlhf_kl("scale", run, "--plugins", "--samples", 8, "--targets", "0.001,0.01", "--json").out)
    assert all(isinstance(row["scores"], float) for row in scaled["rows"])
    assert server.requests
    server.usual = says(f"{SECRET} has expired", 401)
    for words in (("eval",), ("generate", "--scores")):
        outcome = rlhf_kl(words[0], "--run", run, "--plugins", *words[1:])
        assert outcome.code == 1
        assert re.search(r"error: reward: .*401 .*\$\{RM_TOKEN\} has expired", outcome.err)
    outcome = rlhf_kl("train", "--config", tmp_path / "c.yaml", "--output-dir", tmp_path / "other")
    assert outcome.code == 1
    assert SECRET not in outcome.out + outcome.err


@pytest.mark.slow
def test_doctor_tells_of_a_server_that_does_not_answer(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    settings = tiny_settings | {"reward": {"kind": "http", "url": server.url, "retries": 0, "timeout": 5.0}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    words = ("doctor", "--config", tmp_path / "c.yaml", "--json")
    found = {finding["topic"]: finding for finding in json.loads(rlhf_kl(*words).out)}
    assert found["samples"]["level"] == "fine"
    server.usual = closes
    outcome = rlhf_kl(*words)
    last = json.loads(outcome.out)[-1]
    assert (outcome.code, last["level"]) == (2, "fatal")
    assert server.url in last["text"]
