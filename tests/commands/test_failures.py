"""Disks and memories that are full, folders that go away, reward functions that break: a message, and nothing lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.errors import InputError, RunFailed
from rlhf_kl.rollout.collect import Sampler
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.jsonl import JsonlWriter, read_jsonl
from rlhf_kl.run.tensorboard import TensorBoardWriter
from rlhf_kl.trainers.ppo import PPOTrainer

Train = Callable[..., dict[str, Any]]


def figures(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def unfinished(run: Path, place: Path, kept: int) -> Path:
    copy = Path(shutil.copytree(run, place / "unfinished"))
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "final")
    for checkpoint in checkpoints(copy / "checkpoints"):
        if checkpoint.step > kept:
            shutil.rmtree(checkpoint.path)
    return copy


# ---- disks ----

LIMITED = """
import resource, sys
from rlhf_kl import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(cli.run(sys.argv[2:]))
"""


def test_a_full_disk_leaves_the_last_checkpoint_and_names_what_to_free(
    train: Train, tiny_run: Path, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    run = unfinished(tiny_run, tmp_path, 4)
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_settings))
    arguments = ["train", "--config", str(config), "--output-dir", str(run), "--resume"]
    # The rows fit, the next checkpoint does not.
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "30000", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for words in ("step-000006", "File too large", "a checkpoint takes 0.", "MB are free", "step 4 is complete"):
        assert words in line
    assert [c.step for c in checkpoints(run / "checkpoints")] == [2, 4]
    assert all(c.damage() is None for c in checkpoints(run / "checkpoints"))
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    train(run, resume=True)
    assert figures(run) == figures(tiny_run)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_row_that_cannot_be_written_leaves_nothing_of_itself(
    train: Train, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write = JsonlWriter.write

    def fails(self: JsonlWriter, row: Any) -> None:
        if self.path.name == "metrics.jsonl" and row["step"] == 5:
            raise OSError(number, os.strerror(number), str(self.path))
        write(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", fails)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl.*step 4 is complete: --resume goes on") as caught:
            train(tmp_path / "run")
    assert caught.value.exit_code == 1
    train(tmp_path / "run", resume=True)
    assert figures(tmp_path / "run") == figures(tiny_run)


def test_a_sync_that_fails_is_reported(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, iter(range(1000))

    def fails(descriptor: int) -> None:
        if next(calls) > 20:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(RunFailed, match="Input/output error"):
        train(tmp_path / "run")
    assert all(c.damage() is None for c in checkpoints(tmp_path / "run" / "checkpoints"))


def test_other_errors_of_the_system_are_not_taken_for_the_disks(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ConnectionResetError("the hub is gone")

    monkeypatch.setattr(PPOTrainer, "update", fails)
    with pytest.raises(ConnectionResetError):
        train(tmp_path / "run")


def test_a_view_that_cannot_be_written_does_not_end_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoardWriter, "row", fails)
    assert train(tmp_path / "run", "tracking.tensorboard=true", "ppo.total_episodes=32")["steps"] == 2
    assert capsys.readouterr().err.count("tensorboard: No space left on device") == 1


# ---- folders ----

MOVER = """
import os, pathlib
def count(prompts, responses):
    place = pathlib.Path({place!r})
    lines = (place / "metrics.jsonl").read_text().count("\\n") if (place / "metrics.jsonl").exists() else 0
    if lines == 3:
        {deed}
    return [response.count("a") / 8 for response in responses]
"""


@pytest.mark.parametrize(
    "deed",
    ["place.rename(place.with_name('moved'))", "place.rename(place.with_name('moved')); place.mkdir()"],
    ids=["gone", "replaced"],
)
def test_a_folder_that_goes_away_ends_the_run(train: Train, tmp_path: Path, deed: str) -> None:
    run = tmp_path / "run"
    (tmp_path / "own.py").write_text(MOVER.format(place=str(run), deed=deed))
    with pytest.raises(RunFailed, match="the folder was removed or replaced"):
        train(run, f"reward.kind={tmp_path}/own.py:count")
    assert not run.exists() or not list(run.iterdir())  # nothing was written beside the point
    assert [c.step for c in checkpoints(tmp_path / "moved" / "checkpoints")] == [2]


def test_a_link_in_the_place_of_a_plugin_s_copy_is_refused(train: Train, tiny_data: Any, tmp_path: Path) -> None:
    """One that the run has not made: it is no file of its list yet."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "first.py").write_text((tiny_data.folder / "mine.py").read_text())
    train(tmp_path / "run", "ppo.total_episodes=16", f"reward.kind={tmp_path / 'first.py'}:count")
    (tmp_path / "precious.py").write_text("mine")
    (tmp_path / "run" / "mine.py").symlink_to(tmp_path / "precious.py")
    with pytest.raises(InputError, match=r"run/mine\.py is a link"):
        train(tmp_path / "run", f"reward.kind={tiny_data.reward}", overwrite=True)
    assert (tmp_path / "precious.py").read_text() == "mine"
    assert (tmp_path / "run" / "metrics.jsonl").exists()  # the run of before is still there


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("n" * 300)]
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "kept").mkdir(mode=0o500)
        places += [tmp_path / "kept", tmp_path / "kept" / "run"]
    for place in places:
        with pytest.raises(InputError, match=r"cannot write the run folder|is a file"):
            train(place)


def test_a_file_system_without_locks_is_reported(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    train(tmp_path / "run", "ppo.total_episodes=16")
    assert "has no locks" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", '{"steps": 3}', "[]"])
def test_a_damaged_summary_is_made_anew(train: Train, tiny_run: Path, tmp_path: Path, content: str) -> None:
    copy = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    (copy / "summary.json").write_text(content)
    assert train(copy, resume=True)["steps"] == 6
    assert json.loads((copy / "summary.json").read_text())["stopped_by"] is None
    assert figures(copy) == figures(tiny_run)


# ---- memory ----


def test_memory_that_is_full_with_one_row_ends_the_run_in_words(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PPOTrainer, "losses", full)
    with pytest.raises(RunFailed, match=r"of one row does not fit: .*policy\.lora.*no checkpoint yet") as caught:
        train(tmp_path / "run")
    assert caught.value.exit_code == 1
    assert "batch_size" not in str(caught.value)  # which would change nothing


def test_a_rollout_that_does_not_fit_names_its_own_keys(
    train: Train, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls, sample = unfinished(tiny_run, tmp_path, 4), [], Sampler.__call__

    def full(self: Sampler, step: int) -> Any:
        calls.append(step)
        return sample(self, step) if len(calls) < 2 else torch.empty(1 << 60)

    monkeypatch.setattr(Sampler, "__call__", full)
    with pytest.raises(RunFailed, match=r"a rollout does not fit: lower rollout\.batch_size.*step 4 is complete"):
        train(run, resume=True)
    assert calls == [5, 6]


def test_evaluation_goes_on_with_less_memory_and_the_run_stays_what_it_is(
    train: Train, tiny_run: Path, tmp_path: Path, small_device: Callable[..., list[int]]
) -> None:
    """32 texts do not fit at once; the 16 rows of a rollout do."""
    passes = small_device(16)
    train(tmp_path / "run")
    assert max(passes) > 16
    for row, usual in zip(figures(tmp_path / "run"), figures(tiny_run), strict=True):
        assert row["step"] == usual["step"]
        assert row.get("kl/token") == usual.get("kl/token")
        if "eval/perplexity" in usual:
            assert row["eval/perplexity"] == pytest.approx(usual["eval/perplexity"], rel=1e-5)


def test_a_reward_function_is_not_blamed_for_full_memory(train: Train, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\ndef score(prompts, responses):\n    torch.empty(1 << 60)\n")
    with pytest.raises(RunFailed, match="memory is full"):
        train(tmp_path / "run", f"reward.kind={tmp_path}/own.py:score")


# ---- reward functions ----

BREAKING = """
import pathlib, time
place = pathlib.Path(__file__).parent / "calls"

def score(prompts, responses):
    calls = int(place.read_text()) + 1 if place.exists() else 1
    place.write_text(str(calls))
    if calls >= 8 and {broken}:
        {deed}
    return [response.count("a") / 8 for response in responses]
"""
DEEDS = {
    "raises": (
        "if any('b' in r for r in responses): raise ValueError('no b please')",
        "ValueError: no b please (own.py:9)",
    ),
    "hangs": ("time.sleep(60)", "took longer than 2 s (reward.time_limit) on"),
}


@pytest.mark.parametrize("name", DEEDS)
def test_a_reward_function_that_breaks_in_the_middle_is_told_and_the_run_goes_on(
    train: Train, tiny_run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deed, message = DEEDS[name]
    own = tmp_path / "own.py"
    own.write_text(BREAKING.format(broken=True, deed=deed))
    settings = (f"reward.kind={own}:score", f"reward.time_limit={2 if name == 'hangs' else 600}")
    with pytest.raises(InputError) as caught:
        train(tmp_path / "run", *settings)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1
    assert "--resume goes on" in " ".join(capsys.readouterr().err.split())
    own.write_text(BREAKING.format(broken=False, deed="pass"))
    train(tmp_path / "run", *settings, resume=True)
    assert figures(tmp_path / "run") == figures(tiny_run)
