"""The grid: real runs of a tiny model as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhf_kl.commands.grid import check_folders, train_grid
from rlhf_kl.config.inputs import contents
from rlhf_kl.config.resolve import dump_config
from rlhf_kl.config.variants import load_compare
from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import RunFolder, checkpoint_folders, checkpoint_step
from tests.runs import Cli, rows, sets, updates

Plan = Callable[..., Path]

VARIANTS = {
    "adaptive": {"kl": {"controller": {"kind": "adaptive", "coef": 0.1}}},
    "static": {"kl": {"controller": {"kind": "static", "coef": 0.5}, "ceiling": None}},
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any]) -> Plan:
    """`plan({"name": {...}}, seeds=[0])`: the file of a comparison of the tiny run with these changes."""

    def write(variants: dict[str, Any], seeds: Sequence[int] = (3,)) -> Path:
        folder = tmp_path_factory.mktemp("compare")
        (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings | {"checkpoint": {"every": 2}}))
        settings = {"base": "tiny.yaml", "seeds": list(seeds), "variants": variants}
        (folder / "plan.yaml").write_text(yaml.safe_dump(settings))
        return folder / "plan.yaml"

    return write


@pytest.fixture(scope="module")
def compared(plan: Plan, rlhf_kl: Cli) -> tuple[Path, Path, Any]:
    """A comparison of two runs that came to its end: its file, its folder, what was said."""
    file = plan(VARIANTS)
    out = file.parent / "out"
    return file, out, rlhf_kl("compare", "--config", file, "--output-dir", out, "--jobs", "2")


def test_other_runs_get_another_page(
    compared: tuple[Path, Path, Any], rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (compared[1] / "runs" / name for name in ("adaptive-s3", "static-s3"))
    copy = Path(shutil.copytree(one, tmp_path / "elsewhere" / one.name))  # of the same name
    chosen = [[one], [one, other], [other, one], [copy]]
    pages = [rlhf_kl("compare", *runs).out.splitlines()[-1] for runs in chosen]
    assert pages[1] == pages[2]
    assert len({*pages}) == 3
    assert pages[1].startswith("runs/compare/adaptive-s3+static-s3-")
    for runs, page in zip(chosen, pages, strict=True):
        assert len(json.loads(Path(page).with_name("compare.json").read_text())["variants"]) == len(runs)


def test_trains_reads_and_judges(compared: tuple[Path, Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    _, out, done = compared
    assert done.code == 0, done.err
    runs = sorted((out / "runs").iterdir())
    assert [run.name for run in runs] == ["adaptive-s3", "static-s3"]
    assert "0 finished, 2 to train" in done.err
    assert "static-s3: done" in done.err
    assert done.out.splitlines()[-1] == str(out / "compare.html")
    assert (out / "runs" / "static-s3" / "report.html").is_file()  # the page links to it
    assert (out / "compare.png").is_file()
    document = json.loads((out / "compare.json").read_text())
    shown = rlhf_kl("compare", *runs, "--output-dir", tmp_path, "--json").out
    assert list(json.loads(shown)["variants"]) == list(document["variants"]) == ["adaptive", "static"]
    peak = max(row["kl/token"] for row in updates(out / "runs" / "static-s3")) / document["target"]
    assert document["variants"]["static"]["seeds"]["3"]["peak"] == pytest.approx(peak)
    assert document["verdict"] in done.out
    # Seeds are paired: the first update of both is made by the reference, of the same prompts with the same noise.
    samples = [[row for row in rows(run, "samples.jsonl") if row["step"] == 1] for run in runs]
    first, second = ([(row["prompt"], row["response"]) for row in each if "reference" not in row] for each in samples)
    assert first == second
    assert len(first) == 6


def test_finished_runs_are_used_again_and_can_be_read(
    compared: tuple[Path, Path, Any], tmp_path: Path, rlhf_kl: Cli
) -> None:
    file, out, before = compared
    stamp = (out / "runs" / "static-s3" / "metrics.jsonl").stat().st_mtime_ns
    done = rlhf_kl("compare", "--config", file, "--output-dir", out, "--resume")
    assert (done.code, done.out) == (0, before.out)
    assert "2 finished, 0 to train" in done.err
    assert (out / "runs" / "static-s3" / "metrics.jsonl").stat().st_mtime_ns == stamp
    done = rlhf_kl("compare", out / "runs" / "adaptive-s3", out / "runs" / "static-s3", "--output-dir", tmp_path / "x")
    assert done.code == 0
    assert done.out.replace(str(tmp_path / "x"), str(out)) == before.out
    done = rlhf_kl("compare", "--config", file, "--output-dir", out, "--set", "kl.target=0.2")
    assert (done.code, len(done.err.splitlines())) == (2, 2)
    assert "adaptive-s3 " in done.err
    assert "(kl.target: 0.1 -> 0.2): --overwrite" in done.err


def test_a_run_with_another_function_is_not_used_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "out"
    mine.write_text("def score(prompts, responses): return [1.0] * len(responses)\n")
    file = plan({name: {"reward": {"kind": f"{mine}:score"}, **VARIANTS[name]} for name in VARIANTS})
    grid = load_compare(str(file), [], out, None)
    for run in grid.runs:
        folder = RunFolder(Path(run.config.run.output_dir))
        folder.final.mkdir(parents=True)
        folder.config.write_text(dump_config(run.config))
        folder.summary.write_text(json.dumps({"stopped_by": None, "steps": run.config.updates}))
        folder.inputs.write_text(json.dumps(contents(run.config)))
    check_folders(grid)
    mine.write_text("def score(prompts, responses): return [-1.0] * len(responses)\n")
    with pytest.raises(
        InputError, match=r"reward\.kind: .*mine\.py has changed .*adaptive-s3, static-s3.*--overwrite"
    ) as told:
        check_folders(grid)
    assert len(told.value.problems) == 1
    for run in grid.runs:  # not begun: nothing is used of it
        RunFolder(Path(run.config.run.output_dir)).summary.unlink()
    check_folders(grid)


def test_a_finished_run_keeps_no_checkpoint_to_resume_from(
    compared: tuple[Path, Path, Any], rlhf_kl: Cli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(compared[1] / "runs" / "static-s3", tmp_path / "static-s3"))
    assert not list((run / "checkpoints").iterdir())
    assert "2 finished runs" in compared[2].err
    assert (run / "final").is_dir()
    for words in (("eval", "--run", run, "--checkpoint", 2), ("generate", "--run", run, "--checkpoint", 2)):
        done = rlhf_kl(*words)
        assert done.code == 2
        assert "(it has none: `" in done.err
    # Finished is finished, and what could only go on from a checkpoint is not started anew.
    again = ("train", "--config", run / "config.yaml", "--output-dir", run, "--resume")
    assert rlhf_kl(*again).code == 0
    rows_before = (run / "metrics.jsonl").read_bytes()
    done = rlhf_kl(*again, "--updates", 9)
    assert done.code == 2
    assert "(it has none: `" in done.err
    assert (run / "metrics.jsonl").read_bytes() == rows_before


@pytest.mark.slow
def test_checkpoints_that_the_comparison_asks_for_stay(plan: Plan, rlhf_kl: Cli, tmp_path: Path) -> None:
    """Where `keep` is written; and the best one."""
    best = {"checkpoint": {"best": "eval/perplexity"}}
    file = plan({"kept": {"checkpoint": {"keep": 1}}, "best": best | VARIANTS["static"]})
    assert {run.variant: run.keeps for run in load_compare(str(file)).runs} == {"kept": True, "best": False}
    assert all(run.keeps for run in load_compare(str(file), ["checkpoint.keep=3"]).runs)
    out = tmp_path / "out"
    words = ("compare", "--config", file, "--output-dir", out)
    assert rlhf_kl(*words).code == 0
    steps = {name: checkpoint_folders(out / "runs" / f"{name}-s3" / "checkpoints") for name in ("kept", "best")}
    summary = json.loads((out / "runs" / "best-s3" / "summary.json").read_text())
    assert [path.name for path in steps["kept"]] == ["step-000006"]
    assert [checkpoint_step(path) for path in steps["best"]] == [summary["best_checkpoint"]["step"]]
    # Those of a process that died before it removed them go when the comparison is started again.
    left = steps["best"][0].with_name("step-000001")
    shutil.copytree(steps["best"][0], left)
    assert "1 finished run" in rlhf_kl(*words, "--resume").err
    assert not left.exists()


def test_runs_that_have_not_begun_are_named(compared: tuple[Path, Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compared[1], tmp_path / "out"))
    (out / "runs" / "static-s3" / "config.yaml").unlink()  # a folder without it is one that has only been made
    done = rlhf_kl("compare", out, "--output-dir", tmp_path / "page")
    assert done.code == 0
    assert "note: static-s3: left out" in done.err
    assert "static-s3: left out" in (tmp_path / "page" / "compare.html").read_text()
    metrics = out / "runs" / "adaptive-s3" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    (out / "runs" / "adaptive-s3" / "summary.json").unlink()
    done = rlhf_kl("compare", out / "runs" / "adaptive-s3", "--output-dir", tmp_path / "page")
    assert "note: adaptive-s3: unfinished: 2 of 6" in done.err


@pytest.mark.slow
def test_a_run_that_fails_does_not_hold_up_the_others(plan: Plan, tmp_path: Path, rlhf_kl: Cli) -> None:
    (tmp_path / "bad.py").write_text("def none(prompts, responses):\n    return [float('nan')] * len(responses)\n")
    file = plan({"broken": {"reward": {"kind": f"{tmp_path}/bad.py:none"}}, "adaptive": VARIANTS["adaptive"]})
    done = rlhf_kl("compare", "--config", file, "--output-dir", tmp_path / "out", "--jobs", 2)
    assert done.code == 1
    assert "broken-s3: failed: " in done.err
    assert "adaptive" in done.out


@pytest.mark.parametrize(
    ("jobs", "own", "threads"),
    [(1, None, None), (2, None, "3"), (2, "5", "2"), (2, "1", "1"), (9, "4", "2"), (2, "4,2", "4,2")],
)
def test_each_run_gets_its_share_of_the_cores(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, own: str | None, threads: str | None
) -> None:
    """Of 6 cores, or of the number that the user has set; there are two runs, however many jobs are asked for."""
    started: list[str | None] = []

    def popen(command: list[str], *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        started.append(env.get("OMP_NUM_THREADS"))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr("rlhf_kl.commands.grid.cores", lambda: 6)
    monkeypatch.setattr("rlhf_kl.commands.grid.subprocess.Popen", popen)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    assert not train_grid(load_compare(str(plan(VARIANTS)), [], tmp_path, None), jobs=jobs, overwrite=False)
    assert started == [threads, threads]


def test_only_planned_runs_have_a_config(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a variant that was removed `compare FOLDER` would say that it has not begun."""
    configs = tmp_path / "configs"
    monkeypatch.setattr(
        "rlhf_kl.commands.grid.subprocess.Popen", lambda *_, **options: SimpleNamespace(poll=lambda: 0, returncode=0)
    )
    for names in (["adaptive", "static"], ["adaptive"]):
        file = plan({name: VARIANTS[name] for name in names})
        assert not train_grid(load_compare(str(file), [], tmp_path, None), jobs=1, overwrite=False)
        (configs / "mine.yaml").touch()
    assert {path.stem for path in configs.glob("*.yaml")} == {"adaptive-s3", "mine"}


def test_a_run_has_its_config_though_another_plan_removed_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the same comparison with another seed does, which is started beside it in the same folder."""
    seen: list[bool] = []

    def popen(command: list[str], **options: Any) -> SimpleNamespace:
        seen.append(Path(command[command.index("--config") + 1]).is_file())
        for file in (tmp_path / "configs").iterdir():
            file.unlink()
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr("rlhf_kl.commands.grid.subprocess.Popen", popen)
    train_grid(load_compare(str(plan(VARIANTS)), [], tmp_path, None), jobs=1, overwrite=False)
    assert seen == [True, True]


@pytest.mark.slow
def test_an_interrupted_grid_goes_on(plan: Plan, tmp_path: Path, rlhf_kl: Cli) -> None:
    out = tmp_path / "out"
    words = ["compare", "--config", str(plan(VARIANTS)), "--output-dir", str(out), *sets("ppo.total_episodes=640")]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_kl", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
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
    assert "interrupted; " in errors
    assert metrics.read_bytes().count(b"\n") < 41
    done = rlhf_kl(*words)
    assert done.code == 0, done.err
    assert [row["step"] for row in updates(metrics.parent)] == list(range(1, 41))
    assert "error" not in (out / "logs" / "adaptive-s3.log").read_text()
