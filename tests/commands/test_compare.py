"""The grid: real runs of a tiny model as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhf_kl.commands.grid import Grid
from rlhf_kl.config.compare import load_compare
from rlhf_kl.run.log import read_jsonl

Cli = Callable[..., Any]
VARIANTS = {
    "adaptive": {"kl": {"controller": {"kind": "adaptive", "coef": 0.1}}},
    "static": {"kl": {"controller": {"kind": "static", "coef": 0.5}, "ceiling": None}},
}


@pytest.fixture(scope="module")
def compare_file(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    (folder / "both.yaml").write_text(yaml.safe_dump({"base": "tiny.yaml", "seeds": [3], "variants": VARIANTS}))
    return folder / "both.yaml"


@pytest.fixture(scope="module")
def compared(compare_file: Path, rlhf_kl: Cli) -> tuple[Path, Any]:
    """A comparison of two runs that came to its end."""
    out = compare_file.parent / "out"
    return out, rlhf_kl("compare", "--config", compare_file, "--output-dir", out, "--jobs", "2")


def test_other_runs_get_another_page(
    compared: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (compared[0] / "runs" / name for name in ("adaptive-s3", "static-s3"))
    copy = Path(shutil.copytree(one, tmp_path / "elsewhere" / one.name))  # of the same name
    sets = [[one], [one, other], [other, one], [copy]]
    pages = [rlhf_kl("compare", *runs).out.splitlines()[-1] for runs in sets]
    assert pages[1] == pages[2]
    assert len({*pages}) == 3
    assert pages[1].startswith("runs/compare/adaptive-s3+static-s3-")
    for runs, page in zip(sets, pages, strict=True):
        document = json.loads(Path(page).with_name("compare.json").read_text())
        assert len(document["variants"]) == len(runs)


def test_trains_reads_and_judges(compared: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    out, done = compared
    assert done.code == 0, done.err
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["adaptive-s3", "static-s3"]
    assert "2 runs: 0 finished, 2 to train" in done.err
    assert "static-s3: done in " in done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Too short to say: adaptive") or "adaptive" in lines[0]
    assert "1 seed: no difference can be judged" in done.out
    assert ["variant", "target", "KL/token", "score", "perplexity"] in [line.split() for line in lines]
    assert lines[-1] == str(out / "compare.html")
    assert (out / "runs" / "static-s3" / "report.html").is_file()  # the page links to it
    document = json.loads((out / "compare.json").read_text())
    shown = rlhf_kl("compare", *(out / "runs").iterdir(), "--output-dir", tmp_path, "--json").out
    assert json.loads(shown)["variants"].keys() == document["variants"].keys()
    assert list(document["variants"]) == ["adaptive", "static"]
    rows = [row for row in read_jsonl(out / "runs" / "static-s3" / "metrics.jsonl") if "kl/token" in row]
    mine = document["variants"]["static"]["seeds"]["3"]
    assert mine["peak"] == pytest.approx(max(row["kl/token"] for row in rows) / document["target"])
    assert document["verdict"] in done.out
    assert (out / "compare.png").stat().st_size > 10_000


def test_seeds_are_paired(compared: tuple[Path, Any]) -> None:
    """The first update of both is made by the reference: the same prompts and the same noise."""
    runs = [read_jsonl(compared[0] / "runs" / name / "samples.jsonl") for name in ("adaptive-s3", "static-s3")]
    first = [
        [(row["prompt"], row["response"]) for row in rows if row["step"] == 1 and row["chosen"] != "held out"]
        for rows in runs
    ]
    assert first[0] == first[1]
    assert len(first[0]) == 6


def test_finished_runs_are_used_again_and_can_be_read(
    compared: tuple[Path, Any], compare_file: Path, tmp_path: Path, rlhf_kl: Cli
) -> None:
    out, before = compared
    stamp = (out / "runs" / "static-s3" / "metrics.jsonl").stat().st_mtime_ns
    done = rlhf_kl("compare", "--config", compare_file, "--output-dir", out, "--resume")
    assert (done.code, done.out) == (0, before.out)
    assert "2 runs: 2 finished, 0 to train" in done.err
    assert (out / "runs" / "static-s3" / "metrics.jsonl").stat().st_mtime_ns == stamp
    done = rlhf_kl("compare", out / "runs" / "adaptive-s3", out / "runs" / "static-s3", "--output-dir", tmp_path / "x")
    assert done.code == 0
    assert done.out.replace(str(tmp_path / "x"), str(out)) == before.out


def test_a_run_with_other_settings_is_refused(compared: tuple[Path, Any], compare_file: Path, rlhf_kl: Cli) -> None:
    done = rlhf_kl("compare", "--config", compare_file, "--output-dir", compared[0], "--set", "kl.target=0.2")
    assert done.code == 2
    assert len(done.err.splitlines()) == 2
    assert "adaptive-s3 holds a run with other settings (kl.target: 0.1 -> 0.2): --overwrite" in done.err


@pytest.mark.slow
def test_a_run_that_fails_does_not_hold_up_the_others(
    compare_file: Path, tmp_path: Path, rlhf_kl: Cli, tiny_data: Any
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def none(prompts, responses):\n    return [float('nan')] * len(responses)\n")
    variants = {"broken": {"reward": {"kind": f"{bad}:none"}}, **VARIANTS}
    del variants["static"]
    file = tmp_path / "three.yaml"
    base = str(compare_file.parent / "tiny.yaml")
    file.write_text(yaml.safe_dump({"base": base, "seeds": [0], "variants": variants}))
    done = rlhf_kl("compare", "--config", file, "--output-dir", tmp_path / "out", "--jobs", 2)
    assert done.code == 1
    assert "broken-s0: failed: " in done.err
    assert "adaptive" in done.out


@pytest.mark.parametrize(("jobs", "own", "threads"), [(1, None, None), (2, None, "3"), (2, "5", "5")])
def test_each_run_gets_its_share_of_the_cores(
    compare_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, own: str | None, threads: str | None
) -> None:
    """Of 6 cores, unless the user has set a number."""
    started: list[str | None] = []

    def popen(command: list[str], *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        started.append(env.get("OMP_NUM_THREADS"))
        return SimpleNamespace(wait=lambda: 0, send_signal=lambda number: None)

    monkeypatch.setattr("rlhf_kl.commands.grid.cores", lambda: 6)
    monkeypatch.setattr("rlhf_kl.commands.grid.subprocess.Popen", popen)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert not Grid(load_compare(str(compare_file), [], tmp_path, None), jobs, False).work()
    assert started == [threads, threads]


@pytest.mark.slow
def test_an_interrupted_grid_goes_on(compare_file: Path, tmp_path: Path, rlhf_kl: Cli) -> None:
    out = tmp_path / "out"
    words = ["compare", "--config", str(compare_file), "--output-dir", str(out), "--set", "ppo.total_episodes=640"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_kl", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal: a background job of a shell starts with SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics = out / "runs" / "adaptive-s3" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; to go on from the last checkpoint: " in errors
    before = metrics.read_bytes().count(b"\n")
    done = rlhf_kl(*words)
    assert done.code == 0, done.err
    log = (out / "logs" / "adaptive-s3.log").read_text()
    steps = [row["step"] for row in read_jsonl(metrics) if "kl/token" in row]
    assert steps == list(range(1, 41))
    assert 3 <= before < 41
    assert "error" not in log
