"""Reward functions and controllers of a user's, over whole runs: secrets, columns, scores that are missing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import Cli, Train, jsonl, rows, unfinished, updates

SECRET = "sk-5e0b7c21d94f"

KEYED = f"""
def score(prompts, responses, api_key: str, url: str, headers: dict):
    assert api_key == {SECRET!r}, "the function gets what the variable holds"
    assert headers == {{"auth": "Bearer {SECRET}"}}
    assert url == "https://x.org/${{v}}"
    return [response.count("a") / 8 for response in responses]
"""


def files_with(folder: Path, text: str) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and text.encode() in path.read_bytes()
    ]


@pytest.mark.slow
def test_a_secret_of_the_environment_reaches_no_file(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", SECRET)
    (tmp_path / "own.py").write_text(KEYED)
    options = {"api_key": "${MY_KEY}", "url": "https://x.org/$${v}", "headers": {"auth": "Bearer ${MY_KEY}"}}
    reward = {"kind": "own.py:score", "missing_eos_penalty": 0.0, **options}
    settings = tiny_settings | {"reward": reward, "tracking": {"tensorboard": True}}
    (tmp_path / "keyed.yaml").write_text(yaml.safe_dump(settings))
    train = ("train", "--config", "keyed.yaml", "--output-dir", "run")
    outcome = rlhf_kl(*train)
    assert outcome.code == 0, outcome.err
    assert rlhf_kl("report", "run").code == 0
    run = tmp_path / "run"
    assert files_with(run, SECRET) == ["own.py"]  # the test's own file, which names the secret to compare it
    assert {"config.yaml", "report.html", "summary.json"} <= set(files_with(run, "${MY_KEY}"))
    assert SECRET not in outcome.out + outcome.err
    monkeypatch.delenv("MY_KEY")
    assert re.search("note: reward.api_key: .*MY_KEY", rlhf_kl("config", "validate", "keyed.yaml").err)
    outcome = rlhf_kl(*train, "--resume")
    assert outcome.code == 2
    assert re.search("reward.api_key: .*MY_KEY", outcome.err)


# ---- columns of the data set

CHECKER = """
def right(prompts, responses, answer, points, bonus=0.5):
    for prompt, a, p in zip(prompts, answer, points):
        assert a == prompt[::-1] and p == {"n": len(prompt)}, (prompt, a, p)  # the row's own, whatever was filtered
    return [bonus + r.count(a[0]) for r, a in zip(responses, answer)]

class Right:
    def __init__(self, bonus): self.bonus = bonus
    def __call__(self, prompts, responses, *, answer, points):
        return right(prompts, responses, answer, points, self.bonus)

def same(prompts, responses, answer):
    return [float(a == p[::-1]) for p, a in zip(prompts, answer)]
"""


WORDS = [a + b + c for a in "abcd" for b in "abcd" for c in "abcd"]
Rows = list[dict[str, Any]]
Checked = Callable[..., tuple[Rows, Rows]]


@pytest.fixture
def checked(train: Train, tmp_path: Path) -> Checked:
    """`checked(code, "reward={{kind: '{mine}:f'}}")`: the updates and samples of a run whose prompts have answers.

    `code` is what the file {mine} holds. Some prompts are empty, too long, or there twice.
    """
    texts = [*WORDS, "", "ab" * 40, *WORDS[:5]]
    answered = [{"q": text, "answer": text[::-1], "points": {"n": len(text)}} for text in texts]
    jsonl(tmp_path / "rows.jsonl", answered)

    def run(code: str, *changes: str, folder: str = "run", resume: bool = False) -> tuple[Rows, Rows]:
        (tmp_path / "mine.py").write_text(code)
        data = f"data={{prompts: '{tmp_path}/rows.jsonl', column: q}}"
        settings = [change.format(mine=tmp_path / "mine.py") for change in changes]
        train(tmp_path / folder, data, "reward.missing_eos_penalty=0", *settings, resume=resume)
        samples = rows(tmp_path / folder, "samples.jsonl")
        return updates(tmp_path / folder), [sample for sample in samples if sample["chosen"] != "held out"]

    return run


def test_every_response_is_checked_by_the_row_of_its_prompt(checked: Checked, tmp_path: Path) -> None:
    terms = "{{one: {{kind: '{mine}:right', weight: 2.0}}, two: {{kind: '{mine}:Right', bonus: 0.5}}}}"
    settings = f"reward={{{{kind: sum, terms: {terms}}}}}", "eval.scorers.same.kind={mine}:same"
    found, samples = checked(CHECKER, *settings)
    assert [row["eval/same"] for row in found if "eval/same" in row] == [1.0] * 3
    assert all(sample["columns"]["answer"] == sample["prompt"][::-1] for sample in samples)
    unfinished(tmp_path / "run", tmp_path / "crashed", kept=4)
    assert checked(CHECKER, *settings, folder="crashed", resume=True)[1] == samples


def test_responses_without_a_score_are_left_out(checked: Checked) -> None:
    """Half of the prompts have no score. Were they counted as 0, scores and returns would lie between."""
    code = """
def f(prompts, responses):
    return [None if p[0] in 'ab' else 3.0 + r.count('c') for p, r in zip(prompts, responses)]
"""
    found, samples = checked(code, "reward={{kind: '{mine}:f', normalize: false}}", "rollout.reference_samples=256")
    assert all(0 < row["rollout/unscored"] < 16 and row["objective/scores"] >= 3.0 for row in found)
    assert all(row["eval/scores"] >= 3.0 for row in found if "eval/scores" in row)
    assert all((sample["score"] is None) == (sample["prompt"][0] in "ab") for sample in samples)


def test_updates_without_any_score_are_skipped_and_break_nothing(
    checked: Checked, rlhf_kl: Cli, tmp_path: Path
) -> None:
    """Four in a row: numbers that are not finite would have turned the policy back."""
    code = """
class Scorer:
    calls = 0
    def __call__(self, prompts, responses):
        self.calls += 1
        return [None if self.calls in (7, 8, 9, 10) else float(len(r)) for r in responses]
"""
    found, _ = checked(code, "reward={{kind: '{mine}:Scorer'}}", "eval.every=100")
    alerts = [alert for row in found for alert in row["alerts"]]
    assert any(alert.startswith("update-skipped: the reward returned") for alert in alerts)
    assert not any(alert.startswith("rolled-back") for alert in alerts)
    assert sorted({row["rollout/unscored"] for row in found}) == [0, 16]
    assert rlhf_kl("report", tmp_path / "run").code == 0


TRL_CHECKER = """
import asyncio

def right(completions, answer, trainer_state, log_extra, log_metric, points=None, **kwargs):
    assert kwargs["prompts"] == [a[::-1] for a in answer] and set(kwargs) >= {"q", "completion_ids"}
    assert all(p == {"n": len(a)} for p, a in zip(points, answer))
    assert "prompt" not in kwargs and "completion" not in kwargs
    assert 0 <= trainer_state.global_step / trainer_state.max_steps <= 1
    for text in completions:
        log_extra("first", [text[:1]])
    log_metric("step", trainer_state.global_step)
    log_metric("step", trainer_state.max_steps)
    return [float(len(ids)) if a[0] != "d" else None for ids, a in zip(kwargs["completion_ids"], answer)]

one = asyncio.Semaphore(1)  # belongs to the first event loop that waits for it

async def late(prompts, completions, **kwargs):
    async def score(text):
        async with one:
            await asyncio.sleep(0)
            return float(len(text))
    return await asyncio.gather(*map(score, completions))

def said(prompts, completions, **kwargs):
    assert all(p[-1]["role"] == "user" for p in prompts)
    assert all(c[0]["role"] == "assistant" and len(c) == 1 for c in completions)
    return [float(len(c[0]["content"])) + p[-1]["content"].count("a") for p, c in zip(prompts, completions)]
"""


def test_a_function_for_trl_works_as_it_is(checked: Checked) -> None:
    right = "{{kind: '{mine}:right', interface: trl, weight: 2.0}}"
    late = "{{kind: '{mine}:late', interface: trl}}"
    found, samples = checked(TRL_CHECKER, f"reward={{{{kind: sum, terms: {{{{right: {right}, late: {late}}}}}}}}}")
    assert [row["log/step"] for row in found] == [(step + 6) / 2 for step in range(6)]
    assert all(row["rollout/unscored"] == 0 for row in found)  # the other term scores them
    for sample in samples:
        length = len(sample["tokens"]) if sample["prompt"][-1] != "d" else 0
        assert sample["score"] == 2.0 * length + len(sample["response"])
        assert sample["columns"]["first"] == sample["response"][:1]


def test_a_function_for_trl_gets_messages_where_the_data_are_messages(checked: Checked, tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", [{"q": [{"role": "user", "content": text}]} for text in WORDS])
    _, samples = checked(TRL_CHECKER, "reward={{kind: '{mine}:said', interface: trl}}")
    for sample in samples:
        assert sample["score"] == len(sample["response"]) + sample["prompt"].count("a")


# ---- what a function does to the process

CAREFUL = """
def f(prompts, responses, points):
    return [p["n"] + r.count("a") for r, p in zip(responses, points)]
"""
CARELESS = """
import os, random, warnings
import numpy as np
import torch

torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
warnings.simplefilter("error")
os.chdir("/")

def f(prompts, responses, points):
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    return [p.pop("n") + r.count("a") for r, p in zip(responses, points)]
"""


def test_what_a_function_does_to_the_process_changes_no_figure(checked: Checked, tmp_path: Path) -> None:
    """Nor what it does to its columns, nor how it seeds the libraries: the program draws nothing from them."""
    changes = "reward={{kind: '{mine}:f'}}", "rollout.samples_per_prompt=2"
    found = checked(CAREFUL, *changes)
    careless = checked(CARELESS, *changes, folder="careless")
    assert careless == found
    unfinished(tmp_path / "careless", tmp_path / "crashed", kept=4)
    assert checked(CARELESS, *changes, folder="crashed", resume=True) == found


HANGS = {
    "a pool whose processes die": """
import multiprocessing, os
def one(text): os._exit(1)
def wait(texts):
    with multiprocessing.get_context("spawn").Pool(1) as pool: return pool.map(one, texts)
""",
    "an executor whose processes wait": """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
def one(text): time.sleep(1000)
def wait(texts):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool: return [*pool.map(one, texts)]
""",
}
CALL = """
from pathlib import Path
calls = 0
def f(prompts, responses):
    global calls
    calls += 1
    if calls < {first}: return [float(len(r)) for r in responses]
    Path({told!r}).touch()
    return wait(responses)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "first", "limit", "signals", "hang"),
    [
        ("doctor", 1, None, 2, "an executor whose processes wait"),
        ("train", 1, None, 2, "a pool whose processes die"),
        ("train", 8, None, 2, "an executor whose processes wait"),
        ("train", 8, 1000, 1, "an executor whose processes wait"),
        ("train", 8, None, 1, "a pool whose processes die"),
    ],
)
def test_a_function_that_hangs_is_ended(
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    command: str,
    first: int,
    limit: float | None,
    signals: int,
    hang: str,
) -> None:
    """By two Ctrl-C at most, or one after the grace period; also among the reference's samples (the first call)."""
    told = tmp_path / "told"
    (tmp_path / "mine.py").write_text(HANGS[hang] + CALL.format(first=first, told=str(told)))
    settings = tiny_settings | {
        "reward": {"kind": "mine.py:f", "time_limit": limit},
        "checkpoint": {"every": 1, "grace": 1 if signals == 1 else 1000},
    }
    (tmp_path / "hangs.yaml").write_text(yaml.safe_dump(settings))
    words = [command, "--config", "hangs.yaml", "--quiet", *(["--output-dir", "run"] if command == "train" else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf_kl", *words], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while not told.exists():
                assert process.poll() is None
                time.sleep(0.1)
            time.sleep(1.0)
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert process.wait(60) in (130, -signal.SIGINT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
